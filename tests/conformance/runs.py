"""Compare a run of jobs/resume.py, or of a similar job, that was killed or stopped with one that ran undisturbed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parent / "jobs" / "resume.py"
STEPS = 21  # 3 epochs of 103 samples, 16 in an update
FULL = pytest.mark.full  # marks a parameter that only `make test-full` runs
EXACT, ROUNDING = 1e-9, 1e-5  # largest differences in float64, and in float32
CLOCKS = {"total_time", "train_time_s", "samples_per_second", "time"}


class OnFirstUse(dict[Any, Any]):
    """Hold the values that `make(key)` returns. Each is made at its first use, so that workers which no test needs are not started."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = value = self._make(key)
        return value


def dtype_of(world: str) -> str:
    """Return the element type in which a world of the tests trains. ZeRO has no float64."""
    return "float32" if world.startswith("zero") else "float64"


def allowed(world: str) -> float:
    """Return how far the weights of a world may be from those of one process."""
    return EXACT if dtype_of(world) == "float64" else ROUNDING


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of two sets of named tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def arguments(
    out: Path,
    faults: Sequence[Any] = (),
    *more: str,
    workers: int = 0,
    run: str = "run",
    world: int = 2,
    job: Path = JOB,
) -> list[str]:
    """Return the arguments of `distributed train`. `more` are flags."""
    return [
        "train", "--script", str(job), "--run-dir", str(out / run), "--nproc-per-node", str(world),
        "--epochs", "3", "--gradient-accumulation-steps", "2", "--checkpoint-every-n-steps", "3", "--log-every-n-steps", "2",
        "--max-restarts", "20", *more, "--", str(out), str(workers), json.dumps(list(faults)),
    ]  # fmt: skip


def newest(run: Path) -> Path:
    """Return the newest checkpoint of a run directory."""
    return sorted(run.glob("checkpoints/step-*"))[-1]


def digests(checkpoint: Path) -> dict[str, Any]:
    """Return the digests of weights, optimizer and random generators."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: record for name, record in files.items() if name != "state.json"}


def progress(checkpoint: Path) -> Any:
    """Return the content of state.json without times."""
    return _timeless(json.loads((checkpoint / "state.json").read_text()))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(inner) for name, inner in value.items() if name not in CLOCKS}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def metrics(run: Path) -> list[Any]:
    """Return the rows of metrics.jsonl without times."""
    return [_timeless(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(out: Path) -> dict[int, dict[int, list[int]]]:
    """Return step -> rank -> the samples of the newest attempt at that step."""
    used: dict[int, dict[int, list[int]]] = {}
    for file in sorted(out.glob("samples-*.jsonl")):
        for line in file.read_text().splitlines():
            if line.endswith("]"):  # otherwise the writer was killed
                _, step, indices = json.loads(line)
                used.setdefault(step, {})[int(file.stem.split("-")[1])] = indices
    return used


def events(run: Path) -> list[str]:
    """Return the names of the events, in order."""
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def assert_same(hurt: Path, clean: Path, run: str = "run") -> None:
    """Assert that the run under `hurt` has the same bits as the one under `clean`, and no sample or log row twice."""
    one, other = newest(hurt / run), newest(clean / "run")
    assert one.name == other.name == f"step-{STEPS:08d}"
    assert digests(one) == digests(other)
    assert progress(one) == progress(other)
    assert samples(hurt) == samples(clean)
    assert metrics(hurt / run) == metrics(clean / "run")
