"""Start the suite's scripts on an adapter and read their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends.capabilities import MODELS
from distributed.callbacks import AVERAGED_WEIGHTS, COUNTS, GRADIENTS, SAMPLES
from distributed.testing.adapter import Adapter

if TYPE_CHECKING:
    import numpy

JOBS = Path(__file__).parent / "jobs"
# Setting that a case needs. An adapter that refuses the setting does not run the case.
NEEDS = {
    "recomputed": ("activation_checkpointing", True), "epoch-schedule": ("scheduler_interval", "epoch"), "several": (MODELS, True),
}  # fmt: skip
# Features that the callbacks of a case need.
_CALLBACK_NEEDS = {"averaged": (AVERAGED_WEIGHTS,), "frozen": (GRADIENTS,), "sampled": (SAMPLES, COUNTS)}
_MARK = "DISTRIBUTED_CONFORMANCE"
# Models this small train more slowly on several threads, and many times more slowly if other programs use the processors too.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_GONE_S = 10.0  # time for processes to end after their command


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that ended."""

    returncode: int
    output: str  # standard output and error
    seconds: float
    # CPU time of the command and of the processes it waited for; a limit on it holds on a busy machine too
    cpu_s: float


# Runs a command: (arguments of `python`, limit in seconds) -> result. `run_python` is the default; a test suite may use
# its own.
Runner = Callable[[Sequence[str], float], Finished]


def run_python(arguments: Sequence[str], timeout: float) -> Finished:
    """Run `python ARGUMENTS`. Raises AssertionError if it takes too long or leaves a process behind."""
    mark, began, cpu_began_s = uuid.uuid4().hex, time.monotonic(), _children_cpu_s()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], env={**_ONE_THREAD, **os.environ, _MARK: mark}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
        left: list[int] = []
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout)
            seconds, cpu_s = time.monotonic() - began, _children_cpu_s() - cpu_began_s
            left = _left(mark, _GONE_S if code is not None else 0.0)
        finally:  # also if the caller's own time limit ends the wait
            for pid in left or _marked(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    assert code is not None, f"not done after {timeout:g} s: {' '.join(arguments)}\n{text[-3000:]}"
    assert not left, f"processes left by {' '.join(arguments)}: {left}\n{text[-3000:]}"
    return Finished(code, text, seconds, cpu_s)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _left(mark: str, patience: float) -> list[int]:
    """Wait at most `patience` seconds for the processes with `mark` in their environment to end. Return the ids of those
    that still run."""
    deadline = time.monotonic() + patience
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _marked(mark: str) -> list[int]:
    wanted, found = f"{_MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """Result of one training."""

    weights: Mapping[str, numpy.ndarray[Any, Any]]
    numbers: Mapping[str, numpy.ndarray[Any, Any]]  # losses, metrics, predictions, gradient norms
    ranks: Sequence[Mapping[str, Any]]  # what each rank saw


@dataclasses.dataclass(frozen=True, eq=False)
class Ran:
    """One start of a script that trains many cases in one element type. The results are in `directory`."""

    adapter: Adapter
    world_size: int
    dtype: str
    directory: Path
    output: str

    def __str__(self) -> str:
        return f"{self.adapter} x {self.world_size}"

    def case(self, name: str) -> Case:
        """Return the result of case `name`."""
        return _case(self.directory, name, self.world_size)

    @property
    def in_float32(self) -> Ran:
        """The same start in float32. It contains at least a `source`."""
        return dataclasses.replace(self, dtype="float32", directory=self.directory.with_name("float32"))

    @property
    def source(self) -> Path:
        """Checkpoint of the training that was cut off in the middle of an epoch."""
        return max((self.directory / "source").rglob("step-*"))  # the other checkpoints are those of better validations


@functools.cache
def _case(directory: Path, name: str, world_size: int) -> Case:
    import numpy
    from safetensors.numpy import load_file

    ranks = [json.loads((directory / f"{name}-{rank}.json").read_text()) for rank in range(world_size)]
    with numpy.load(directory / f"{name}.npz") as numbers:
        return Case(load_file(directory / f"{name}.safetensors"), dict(numbers), ranks)


def train(
    adapter: Adapter, world_size: int, script: str, directory: Path, arguments: Sequence[str], run: Runner
) -> Finished:
    """Run `distributed train` with one of the suite's own scripts."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["-m", "distributed.cli", "train", "--script", str(JOBS / script), *adapter.flags(world_size)]
    return run([*command, "--run-dir", str(directory / "run"), "--", *arguments], 600)


def refused_cases(adapter: Adapter) -> list[str]:
    """Return the cases that need something that the adapter refuses, in general or with its own settings.

    Keras adapters also leave out the case `several`, because several models must be torch modules.
    """
    refused = [case for case, (name, value) in NEEDS.items() if _is_refused(adapter, name, value)]
    refused += [case for case, needs in _CALLBACK_NEEDS.items() if not all(map(adapter.gives, needs))]
    return [*refused, "several"] if adapter.model == "keras" and "several" not in refused else refused


def _is_refused(adapter: Adapter, name: str, value: Any) -> bool:
    found = adapter.capabilities
    setting = name if value is True else f"{name}={value}"
    is_conditional = bool(found.conditions_of(setting)) and not found.missing  # if a library is missing, nothing is run
    return not found.accepts(setting) or (is_conditional and not adapter.takes(**{name: value}))


def has_compiled(adapter: Adapter, world_size: int) -> bool:
    """Return whether the case `compiled` is trained with `world_size` processes.

    The case takes a second or two. It therefore runs in one number of processes only: the smallest above one, or 1
    if there is none.
    """
    chosen = min((size for size in adapter.world_sizes if size > 1), default=1)
    return adapter.takes(compile=True) and world_size == chosen


def train_cases(adapter: Adapter, world_size: int, directory: Path, run: Runner = run_python) -> Ran:
    """Train every case in one start of `world_size` processes."""
    (ran,) = _start(adapter, world_size, directory, ["float64" if adapter.has_float64 else "float32"], run)
    return ran


def _start(
    adapter: Adapter, world_size: int, directory: Path, dtypes: Sequence[str], run: Runner, reference: bool = False
) -> list[Ran]:
    kinds = [kind for kind in ("bf16", "fp16") if adapter.takes(mixed_precision=kind)]
    asked = {
        "model": adapter.model,
        "dtypes": dtypes,
        "refused": refused_cases(adapter),
        "kinds": [*kinds, *(["compile"] if has_compiled(adapter, world_size) else [])],
        "reference": reference,
    }
    done = train(adapter, world_size, "cases.py", directory, [str(directory), json.dumps(asked)], run)
    assert done.returncode == 0, f"{adapter} x {world_size}: exit {done.returncode}\n{done.output[-3000:]}"
    return [Ran(adapter, world_size, dtype, directory / dtype, done.output) for dtype in dtypes]


@dataclasses.dataclass(frozen=True, eq=False)
class References:
    """Results of one process, with which all others are compared."""

    float64: Ran
    float32: Ran

    def like(self, ran: Ran) -> Ran:
        """Return the reference in the element type of `ran`."""
        return self.float64 if ran.dtype == "float64" else self.float32

    def sources(self, ran: Sequence[Ran]) -> list[Ran]:
        """Return the checkpoints to resume elsewhere: those of the reference first, then those of `ran` that are compared with
        it."""
        own = self.float64.adapter
        return [self.float64, *(each for each in ran if each.adapter.reference == own != each.adapter)]


def train_references(adapter: Adapter, directory: Path, run: Runner = run_python) -> References:
    """Train the reference of `adapter` in both element types, in one start."""
    return References(*_start(adapter.reference, 1, directory, ("float64", "float32"), run, reference=True))


class AllReferences:
    """References of all adapters. Each one is trained when it is first needed, and is shared by all adapters with
    that reference."""

    def __init__(self, directory: Path, run: Runner = run_python) -> None:
        self._directory, self._run = directory, run
        self._known: dict[str, References] = {}

    def of(self, adapter: Adapter) -> References:
        """Return the reference of `adapter`."""
        name = f"{adapter.reference}-{adapter.model}"
        if name not in self._known:
            self._known[name] = train_references(adapter, self._directory / name, self._run)
        return self._known[name]
