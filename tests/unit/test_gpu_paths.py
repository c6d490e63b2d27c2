"""What is true of GPUs and can be shown without one."""

from __future__ import annotations

import pytest
import torch
from tests.unit.fake_gpu import HostWaits, fake_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.backends._torch import generators
from distributed.backends._torch.loading import shard
from distributed.backends._torch.nested import move
from distributed.config import DistributedConfig
from distributed.data import DataOptions
from distributed.plan import BatchPlan
from distributed.state import WorkerContext


def test_the_fake_gpu_refuses_what_waits():
    with fake_gpu() as gpu:
        value = torch.ones(2, device=gpu)
        value.to("cpu", non_blocking=True)
        for wait in (lambda: value.sum().item(), lambda: value.to("cpu"), lambda: torch.tensor(1.0, device=gpu)):
            with pytest.raises(HostWaits):
                wait()


class Copies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.asynchronous = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.asynchronous.append((kwargs or {}).get("non_blocking", False))
        return func(*args, **(kwargs or {}))


def test_outputs_are_whole_when_they_leave_the_device():
    with fake_gpu(may_wait=True) as gpu, Copies() as copies:
        outputs = {"scores": torch.ones(2, 3, device=gpu)}
        assert move(outputs, torch.device("cpu"), None)["scores"].device.type == "cpu"
        assert move(outputs, torch.device("cpu"), torch.float64)["scores"].dtype == torch.float64
        assert copies.asynchronous == [False, False]  # else torch gives page-locked memory that is still being filled
        copies.asynchronous.clear()
        move([torch.ones(2)], gpu, None)
        assert copies.asynchronous == [True]


@pytest.fixture
def other_gpu(monkeypatch):
    """A GPU is there, and nobody may touch it: the run is on CPUs."""

    def touched(*args, **kwargs):
        raise AssertionError("a run on CPUs used the GPU")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", touched)


def test_a_run_on_cpus_leaves_the_gpu_alone(other_gpu, tmp_path):
    generators.save_rng(tmp_path, 0, torch.device("cpu"))
    assert generators.load_rng(tmp_path, 0, torch.device("cpu"))
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
    for dataset in (loader, torch.utils.data.DataLoader(list(torch.ones(4, 2)), batch_size=2, pin_memory=True)):
        cut = shard(
            dataset, batch=BatchPlan(2, 1, 1, 2), context=WorkerContext(0, 1, 0, 1, 0, "cpu"), config=DistributedConfig(),
            options=DataOptions(), train=True, reduce=dict,
        )  # fmt: skip
        assert sum(group.num_samples for group in cut.epoch(0)) == 4


def test_generators_saved_on_a_cpu_are_not_taken_for_those_of_a_gpu(tmp_path):
    generators.save_rng(tmp_path, 0, torch.device("cpu"))
    before = torch.get_rng_state()
    torch.manual_seed(7)
    assert not generators.load_rng(tmp_path, 0, torch.device("cuda", 0))  # the caller seeds them from seed, step and rank
    assert not torch.equal(torch.get_rng_state(), before)
