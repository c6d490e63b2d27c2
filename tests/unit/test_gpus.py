"""The number of GPUs as drivers, containers and masks show it; drivers are played by directories."""

from __future__ import annotations

import pytest

from distributed.config import gpus


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without GPUs: tests add what a driver would."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "_NVIDIA_DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(gpus, "_AMD_DRIVER", tmp_path / "kfd")
    (tmp_path / "dev").mkdir()
    return tmp_path


def nvidia(machine, count):
    for i in range(count):
        (machine / "dev" / f"nvidia{i}").touch()


def amd(machine, ids):
    for number, gpu_id in enumerate(ids):
        (machine / "kfd" / str(number)).mkdir(parents=True)
        (machine / "kfd" / str(number) / "gpu_id").write_text(f"{gpu_id}\n")


def test_a_machine_without_a_driver_has_none(machine):
    assert gpus.visible_gpus() == 0


def test_a_container_has_the_devices_it_was_given(machine):
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (machine / "dev" / name).touch()
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (machine / "nvidia" / name).mkdir(parents=True)
    assert gpus.visible_gpus() == 1


def test_a_driver_whose_device_nodes_are_not_made_yet_counts(machine):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (machine / "nvidia" / name).mkdir(parents=True)
    assert gpus.visible_gpus() == 2


@pytest.mark.parametrize(("answers", "count"), [((0, 0, 2), 2), ((9, 0, 2), 0), ((0, 9, 2), 0), (None, 0)])
def test_windows_subsystem_asks_the_management_library(machine, monkeypatch, answers, count):
    (machine / "dev" / "dxg").touch()

    class Library:
        def __init__(self, name):
            if answers is None:
                raise OSError(name)
            self.nvmlInit_v2 = lambda: answers[0]

        def nvmlDeviceGetCount_v2(self, reference):
            reference._obj.value = answers[2]
            return answers[1]

    monkeypatch.setattr(gpus.ctypes, "CDLL", Library)
    assert gpus.visible_gpus() == count


@pytest.mark.parametrize(
    ("mask", "count"),
    [
        ("", 0), ("-1", 0), ("1", 1), ("0,2", 2), (" 3 , 1", 2), ("0,-1,2", 1), ("0,4", 1), ("NoDevFiles", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1), ("MIG-a,MIG-b", 2),
    ],
)  # fmt: skip
def test_a_mask_counts_up_to_its_first_entry_that_is_no_device(machine, monkeypatch, mask, count):
    nvidia(machine, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert gpus.visible_gpus() == count


def test_a_mask_makes_no_gpu(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gpus.visible_gpus() == 0


def test_amd_gpus_count_where_torch_is_built_for_them(machine, monkeypatch):
    amd(machine, [0, 4711, 4712, 4713])  # the first one is the processor
    assert gpus.visible_gpus() == 0
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+rocm6.4")
    assert gpus.visible_gpus() == 3
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert gpus.visible_gpus() == 1
