"""Event files by themselves: what is cut at a resume, a full disk, names of runs, GPUs; and settings that are refused."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
import types
from pathlib import Path

import numpy
import pytest

from distributed.backends.world import OneProcess
from distributed.callbacks import gpus
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, ResourceError
from distributed.loggers import event_file, tensorboard
from distributed.loggers.event_file import EventFile, cut, files_in
from distributed.loggers.histograms import Histograms
from distributed.loggers.observer import Observer
from distributed.loggers.registry import check
from distributed.runs.directory import RunDirectory
from distributed.state import TrainState, WorkerContext
from tests import event_files

CONTEXT = WorkerContext(0, 1, 0, 1, 0, "cpu")


class Graph(Observer):
    def __init__(self):
        super().__init__(1)

    def graph(self):
        from tensorboard.compat.proto.graph_pb2 import GraphDef
        from tensorboard.compat.proto.node_def_pb2 import NodeDef

        return GraphDef(node=[NodeDef(name="model")]).SerializeToString()


class NoGraph(Graph):
    def graph(self):
        raise RuntimeError("cannot be traced\nat all")


def merged(**settings):
    return MergedConfig(DistributedConfig(**settings), dict.fromkeys(settings, "code"), {"depth": 3})


def logger(directory, told=None, backend=Graph, **settings):
    fit = types.SimpleNamespace(
        run=RunDirectory(directory), merged=merged(**{"tensorboard": True, **settings}), plan=ProcessPlan(1, 1, "cpu", "fake"),
        batch=BatchPlan(4, 1, 1, 4), context=CONTEXT,
        backend=types.SimpleNamespace(observer=backend()), on_event=(told if told is not None else []).append,
    )  # fmt: skip
    boards.append(tensorboard.TensorBoard(fit))
    return boards[-1]


boards: list[tensorboard.TensorBoard] = []


@pytest.fixture(autouse=True)
def _close_what_a_kill_left_open():
    yield
    for board in boards:
        if board._file is not None:
            board._file.close()
    boards.clear()


def run(directory, start, steps, told=None, **settings):
    """One attempt: from the state `start` to its end, or until it is killed."""
    board = logger(directory, told, **settings)
    board.on_train_start(start)
    for step in steps:
        state = TrainState(step=step, epoch=start.epoch)
        board.on_log(state, "train", {"loss": float(step)})
        board.on_times(state, {"step_s": 0.5, "rank_0_s": 0.25, "rank_1_s": 0.5})
        if step % 4 == 0:
            board.on_log(TrainState(step=step), "val", {"loss": float(step)})
    return board


def points(directory):
    """(step, tag) of all that a reader sees that knows nothing of restarts."""
    contents = [path.read_bytes() for path in files_in(directory)]
    events = [event for content in contents for _, event in event_file._events(content)]
    return [(event.step, value.tag) for event in events for value in event.summary.value]


@pytest.mark.parametrize(
    ("state", "train", "val"),
    [
        (TrainState(step=4, epoch=1, rows=[{"epoch": 1, "step": 4}]), 4, 4),
        (TrainState(step=4, samples_in_epoch=16, rows=[{"epoch": 1, "step": 4}]), 4, 4),  # validated in the epoch
        (TrainState(step=4, samples_in_epoch=16), 4, 0),  # saved before its validation, which comes again
        (TrainState(step=4, samples_in_epoch=16, log_sums={"loss": [1.0, 1.0]}), 2, 0),  # a log line that comes again
        (TrainState(), 0, 0),  # killed before there was a checkpoint
    ],
)
def test_what_comes_again_after_a_resume_is_cut(tmp_path, state, train, val):
    run(tmp_path, TrainState(), [2, 4, 6, 8])
    (path,) = files_in(tmp_path / "tensorboard")
    with path.open("ab") as file:
        file.write(b"half a rec")
    run(tmp_path, state, [6, 8]).on_train_end(TrainState(step=8))

    board = event_files.read(tmp_path / "tensorboard")
    steps = [*range(2, train + 1, 2), 6, 8]
    assert event_files.steps(board, "train/loss") == steps
    assert event_files.steps(board, "val/loss") == [step for step in (4, 8) if step <= val or step > 4]
    assert event_files.steps(board, "time/slowest_rank") == steps
    assert event_files.hyperparameters(board)["depth"] == 3
    assert event_files.status(board) == 1
    assert event_files.graph(board) == ["model"]
    found = points(tmp_path / "tensorboard")
    assert len(found) == len(set(found)) and [step for step, tag in found if tag == "train/loss"] == steps


def test_a_run_killed_before_its_first_log_line_has_its_graph_after_the_resume(tmp_path):
    run(tmp_path, TrainState(), [])
    board = run(tmp_path, TrainState(), [2])
    assert board._fit.backend.observer.keeps_batch and event_files.graph(
        event_files.read(tmp_path / "tensorboard")
    ) == ["model"]
    assert not run(tmp_path, TrainState(step=2), [4])._fit.backend.observer.keeps_batch


@pytest.mark.parametrize("state", [TrainState(step=4, epoch=1), TrainState()])
def test_a_reader_that_had_seen_more_is_told_to_forget_it(tmp_path, state):
    run(tmp_path, TrainState(), [2, 4, 6, 8])
    board = event_files.read(tmp_path / "tensorboard")
    run(tmp_path, state, range(state.step + 2, 10, 2))
    board.Reload()
    assert event_files.steps(board, "train/loss") == [2, 4, 6, 8]


def test_the_session_ends_as_the_run_did(tmp_path):
    def ended(name, end):
        end(run(tmp_path / name, TrainState(), [2]))
        return event_files.read(tmp_path / name / "tensorboard")

    assert event_files.status(ended("whole", lambda board: board.on_train_end(TrainState(step=2)))) == 1
    assert event_files.status(ended("failed", lambda board: board.on_error(TrainState(step=2), RuntimeError()))) == 2
    stopped = ended("stopped", lambda board: board.on_train_end(TrainState(step=2, stop_reason="signal 15")))
    assert "_hparams_/session_end_info" not in stopped.summary_metadata


def test_every_record_carries_the_checksums_that_tensorboard_checks(tmp_path):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    for data in (b"", b"a", bytes(range(256)) * 5):
        assert event_file._checksum(data) == masked_crc32c(data)


@pytest.fixture
def disk(monkeypatch):
    """`is_full`: new files take half of what is written."""
    real = Path.open

    class Disk(io.FileIO):
        is_full = False

        def write(self, data):
            if not Disk.is_full:
                return super().write(data)
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path, mode="r", *rest, **more):
        return Disk(path, "x") if mode == "xb" else real(path, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", opened)
    return Disk


@pytest.mark.parametrize("full", [{0, 2, 4}, {4, 6}])
def test_a_full_disk_costs_points_and_one_warning(tmp_path, disk, full):
    told = []
    board = logger(tmp_path, told)
    disk.is_full = 0 in full
    board.on_train_start(TrainState())
    for step in (2, 4, 6, 8):
        disk.is_full = step in full
        board.on_log(TrainState(step=step), "train", {"loss": 1.0})
    assert len(files_in(tmp_path / "tensorboard")) == 1
    found = event_files.steps(event_files.read(tmp_path / "tensorboard"), "train/loss")
    assert found == [step for step in (2, 4, 6, 8) if step not in full]
    warnings = [each["text"] for each in told if each["kind"] == "warning"]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_a_directory_that_went_read_only_is_one_warning(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    told = []
    run(tmp_path, TrainState(), [2, 4], told).on_train_end(TrainState(step=4))
    assert [each["kind"] for each in told if each["kind"] == "warning"] == ["warning"]


def test_a_model_that_cannot_be_traced_is_one_notice(tmp_path):
    told = []
    run(tmp_path, TrainState(), [2, 4], told, backend=NoGraph)
    (notice,) = [each["text"] for each in told if each["kind"] == "notice"]
    assert "no graph" in notice and "(RuntimeError: cannot be traced)" in notice


def test_runs_below_one_directory_keep_apart_and_a_resume_finds_its_own(tmp_path):
    boards = tmp_path / "boards"
    for place in ("a", "b"):
        (tmp_path / place / "run").mkdir(parents=True)
        run(tmp_path / place / "run", TrainState(), [2, 4], tensorboard_dir=str(boards))
    run(tmp_path / "b" / "run", TrainState(step=2), [4, 6], tensorboard_dir=str(boards))
    assert sorted(path.name for path in boards.iterdir()) == ["run", "run-2"]
    found = {name: event_files.steps(event_files.read(boards / name), "train/loss") for name in ("run", "run-2")}
    assert found == {"run": [2, 4], "run-2": [2, 4, 6]}


def test_cutting_leaves_what_is_kept_and_removes_files_without_it(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event

    for steps in ([1, 2], [5], [3, 9]):
        file = EventFile(tmp_path)
        for step in steps:
            file.write(Event(step=step))
        file.close()
    assert cut(tmp_path, lambda event: event.step < 4)
    assert [[event.step for _, event in event_file._events(path.read_bytes())] for path in files_in(tmp_path)] == [
        [1, 2],
        [3],
    ]
    assert not cut(tmp_path, lambda event: False) and files_in(tmp_path) == []


def test_a_directory_alone_asks_for_event_files_unless_they_are_switched_off():
    assert tensorboard.is_on(merged(tensorboard_dir="runs"))
    assert not tensorboard.is_on(merged(tensorboard_dir="runs", tensorboard=False))
    assert not tensorboard.is_on(merged())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tensorboard_histograms": True}, "set tensorboard=True too"),
        ({"profile_wait": 3}, "set profile=True"),
        ({"profile_active": 3, "profile": False}, "set profile=True"),
    ],
)
def test_settings_that_do_nothing_alone_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        check(merged(**settings))


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"pip install 'distributed-trainer\[tensorboard\]'"):
        check(merged(tensorboard=True))
    check(merged())


def test_a_folder_of_the_librarys_name_beside_the_script_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "tensorboard").mkdir()
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ResourceError, match="needs tensorboard, which is not installed: run pip install"):
        check(merged(tensorboard=True))


def test_a_file_in_the_place_of_the_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "tensorboard.py").write_text("")
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ResourceError, match=r"tensorboard\.py hides the library tensorboard: rename"):
        check(merged(tensorboard=True))


@pytest.mark.parametrize(
    "values",
    [
        numpy.float32([1, 1 - 6e-8]),  # two neighbours: a normalization's weights at their start
        numpy.array([1, math.nextafter(1, 2)]),
        numpy.array([1e20, 1e20]),
        numpy.float32([0, 0]),
        numpy.float32([-1, 0, 3]),
    ],
)
def test_a_histogram_counts_every_value_however_near_they_are(values):
    observer = types.SimpleNamespace(cuts_weights=False, local_values=lambda: [("weights/w", values)])
    backend = types.SimpleNamespace(observer=observer, world=OneProcess(CONTEXT))
    written = []
    writer = types.SimpleNamespace(write=lambda values, step: written.extend(values))
    settings = types.SimpleNamespace(config=types.SimpleNamespace(tensorboard_histograms=True))
    fit = types.SimpleNamespace(backend=backend, callbacks=[], merged=settings)
    Histograms(fit, writer).on_epoch_end(TrainState(), {})

    (found,) = [value.histo for value in written]
    edges = list(found.bucket_limit)
    assert found.num == sum(found.bucket) == len(values) and edges == sorted(set(edges)) and len(edges) == 64
    assert (found.min, found.max) == (values.min(), values.max()) and edges[-1] >= values.max()


class Nvml:
    """A driver with three GPUs, of which the last tells nothing of its use."""

    used = (1, 2, 3)

    @pytest.fixture
    def driver(self, monkeypatch):
        import pynvml

        def utilization(number):
            if number == 2:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return types.SimpleNamespace(gpu=10 * number)

        functions = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetHandleByUUID": lambda name: {"GPU-b": 1}[name],
            "nvmlDeviceGetMemoryInfo": lambda number: types.SimpleNamespace(used=self.used[number] * 2**30),
            "nvmlDeviceGetUtilizationRates": utilization,
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)


class TestGpus(Nvml):
    def test_the_gpus_of_this_nodes_workers_are_read_in_their_order(self, driver, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-b,0")
        found = gpus.Gpus(WorkerContext(4, 6, 0, 2, 2, "cuda:0"))
        assert found.read() == {"gpu/memory_gib_0": 3.0, "gpu/memory_gib_1": 2.0, "gpu/utilization_1": 10.0}
        assert found.read() == {}  # within the same second

    def test_on_cpus_there_are_none(self, driver):
        assert gpus.Gpus(CONTEXT).read() == {}

    def test_without_a_driver_there_are_none(self, monkeypatch):
        import pynvml

        def fail():
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", fail)
        assert gpus.Gpus(WorkerContext(0, 1, 0, 1, 0, "cuda:0")).read() == {}


@pytest.mark.parametrize("length", [event_file._LARGE, event_file._LARGE + 1, 3 * event_file._LARGE + 255])
def test_the_checksum_of_a_large_record_is_that_of_its_bytes(length, monkeypatch):
    data = bytes(number * number % 251 for number in range(length))
    found = event_file._checksum(data)
    monkeypatch.setattr(event_file, "_LARGE", length + 1)
    assert found == event_file._checksum(data)
