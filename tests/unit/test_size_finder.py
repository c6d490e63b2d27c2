"""The batch-size finder: which sizes it tries, what it refuses, and what counts as too little memory."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from distributed import ConfigError, ResourceError, Trainer, TrainingError, TrainingInterrupted
from distributed.backends.out_of_memory import is_out_of_memory, memory_line
from distributed.finders import batch_size as size_finder
from distributed.finders.batch_size import NotThatSize, OutOfMemory
from distributed.runs.directory import RunDirectory


def trainer(**settings):
    return Trainer(torch.nn.Linear(2, 2), device="cpu", verbose=False, **settings)


@pytest.fixture
def tried(monkeypatch):
    """The sizes that were tried, where 40 samples fit."""
    sizes = []

    def attempt(trainer, data, size):
        sizes.append(size)
        return None if size <= 40 else OutOfMemory("rank 1 is out of memory: so it goes")

    monkeypatch.setattr(size_finder, "_try", attempt)
    return sizes


@pytest.mark.parametrize(
    ("limits", "found", "sizes"),
    [
        ({"max_size": 1000}, 32, [8, 16, 32, 64]),
        ({"start": 5, "max_size": 1000}, 40, [5, 10, 20, 40, 80]),
        ({"start": 1, "max_size": 7}, 4, [1, 2, 4]),
    ],
)
def test_it_doubles_until_it_does_not_fit(tried, limits, found, sizes):
    assert trainer().find_batch_size([], **limits) == found
    assert tried == sizes


def test_a_start_that_does_not_fit_is_refused(tried):
    with pytest.raises(ResourceError, match=r"start=41 is too large \(rank 1 is out of memory: so it goes\): lower it"):
        trainer().find_batch_size([], start=41, max_size=64)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "needs max_size on CPUs"),
        ({"start": 0}, "start=0 is not a batch size"),
        ({"max_size": 32.0}, "max_size=32.0 is not a batch size"),
        ({"start": 64, "max_size": 32}, "max_size=32 is below start=64"),
    ],
)
def test_what_is_no_range_is_refused(tried, limits, said):
    with pytest.raises(ConfigError, match=said):
        trainer().find_batch_size([], **limits)
    assert tried == []


def test_workers_are_asked_for_a_plain_script(tried):
    one = trainer()
    one.setup.worker = SimpleNamespace(rank=0)
    with pytest.raises(ConfigError, match="would block those of this run: call it in a script"):
        one.find_batch_size([], max_size=8)


def raised(action):
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


class ResourceExhaustedError(Exception):
    """As TensorFlow calls its own."""


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (raised(lambda: torch.empty(1 << 50)), True),
        (raised(lambda: bytearray(1 << 60)), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (ResourceExhaustedError("OOM when allocating tensor with shape[1,2]"), True),
        (raised(lambda: torch.empty(2, 3) @ torch.empty(2, 3)), False),
        (ValueError("Expected more than 1 value per channel; out of memory is no word of mine"), False),
    ],
)
def test_what_counts_as_too_little_memory(error, is_it):
    wrapped = raised(lambda: _around(error))
    assert is_out_of_memory(error) is is_it and is_out_of_memory(wrapped) is is_it


def test_the_line_that_says_it_is_shown():
    said = "OOM when allocating tensor with shape[70368744177664]"
    assert memory_line(
        ResourceExhaustedError(f"Graph execution error:\n\nDetected at node\n  {said} and type float")
    ) == (f"{said} and type float")
    assert memory_line(MemoryError()) == "MemoryError"


def _around(error):
    raise KeyError("around it") from error


@pytest.mark.parametrize(
    ("code", "cause", "kind"),
    [
        (4, "rank 1 is out of memory: tried", OutOfMemory),
        (5, "the data gives", NotThatSize),
        (1, "rank 0 was killed by signal 9 (SIGKILL)", OutOfMemory),
    ],
)
def test_the_end_of_the_workers_says_why_a_size_does_not_fit(code, cause, kind, tmp_path):
    (tmp_path / "events.jsonl").write_text(
        json.dumps({"event": "worker_failed", "time": 1.0, "rank": 0, "cause": cause}) + "\n"
    )
    reason = size_finder._reason(code, RunDirectory(tmp_path))
    assert type(reason) is kind and str(reason) == cause


def test_another_failure_is_raised(tmp_path):
    event = {
        "event": "worker_failed",
        "time": 1.0,
        "rank": 0,
        "cause": "rank 0 failed with ValueError: no",
        "traceback": "Traceback",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    with pytest.raises(TrainingError, match="rank 0 failed with ValueError: no"):
        size_finder._reason(1, RunDirectory(tmp_path))


@pytest.mark.parametrize("interrupted", [KeyboardInterrupt(), 143, 2, 3])
def test_an_attempt_that_is_interrupted_or_refused_leaves_nothing(interrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_in_workers(attempt, finder, merged, run):
        assert run.path.is_dir()
        if isinstance(interrupted, int):
            return interrupted
        raise interrupted

    monkeypatch.setattr(size_finder, "run_in_workers", run_in_workers)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    with pytest.raises((KeyboardInterrupt, TrainingInterrupted, ConfigError, ResourceError)):
        trainer().find_batch_size(data, max_size=8)
    assert list(tmp_path.iterdir()) == []
