"""Reports of workers that reach their launcher over a connection: their progress, their stacks, and the stacks of a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed.launching.heartbeat import NUM_VALUES, Reports, progress_in
from distributed.launching.loader_stacks import LoaderProcess, WorkerStacks
from distributed.launching.stacks import ProcessStacks

_ANSWER_S = 30.0  # time for all workers to send their stacks, also if py-spy has to look at some processes from outside
_LOOK_S = 0.25  # seconds between two looks whether the answers are still wanted
_MOST_LOADERS = 1000  # loader processes of a worker
_MOST_BYTES = 400_000  # of a text in JSON, so that a line with two of them is shorter than `LINE_BYTES`
_MOST_CHARACTERS = 80_000  # of the stacks of one process
_FEWER_CHARACTERS = 30_000  # if JSON needs up to 12 bytes for each of them


class WorkerReports(Reports):
    """Keep the reports of the workers of an attempt, by rank. Only one thread may call `inspect`, and any thread the other methods.

    Args:
        ask: called with a command that all reporters of workers receive.
        missing: returns what takes the place of the stacks of a worker that does not answer, when called with its process id.

    Attributes:
        attempt: the number of attempts that have begun.
    """

    def __init__(self, ask: Callable[..., None], missing: Callable[[int], ProcessStacks]) -> None:
        self._ask, self._missing = ask, missing
        self._changed = threading.Condition()
        self._values: dict[int, list[int]] = {}
        self._crashes: dict[int, str] = {}
        self._number, self._is_asking = 0, False  # the newest request for stacks, and whether it waits for answers
        self.attempt = 0
        self._ended: set[int] = set()  # the workers of the attempt that have ended
        self._loaders: dict[int, list[LoaderProcess]] = {}  # those of the newest request
        self._processes: dict[int, ProcessStacks] = {}

    def begin(self) -> None:
        """Forget the workers of the attempt before."""
        with self._changed:
            self._values, self._crashes, self._ended = {}, {}, set()
            self.attempt += 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def held(self, attempt: int) -> Iterator[bool]:
        """Let no other attempt begin in the block. Yield whether none has begun after `attempt`."""
        with self._changed:
            yield attempt == self.attempt

    def end(self, rank: int) -> None:
        """Record that a worker has ended, and does not answer any more."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def values(self, index: int) -> list[int]:
        """Return the newest integers of the worker, or zeros if it has sent none."""
        return self._values.get(index, [0] * NUM_VALUES)

    def crash(self, index: int) -> str:
        """Return the stacks of a worker that crashed, or ""."""
        return self._crashes.get(index, "")

    def add(self, rank: int, answer: Mapping[str, Any]) -> None:
        """Add an answer of a worker. Raises ValueError, TypeError or KeyError if no worker sends such an answer."""
        with self._changed:
            if "values" in answer:
                self._values[rank] = checked_values(answer["values"])
            if answer.get("crash"):
                self._crashes[rank] = str(answer["crash"])
            if "stacks" in answer and answer["number"] == self._number and self._is_asking:
                process = _stacks_in(answer["stacks"])
                if answer["loader"] is not None:
                    loaders = self._loaders.setdefault(rank, [])
                    if len(loaders) < _MOST_LOADERS:
                        loaders.append(LoaderProcess(int(answer["loader"]), process))
                else:  # the last one of this worker
                    self._processes[rank] = process
                    self._changed.notify_all()

    def inspect(self, pids: Mapping[int, int], is_over: Callable[[], bool] = lambda: False) -> dict[int, WorkerStacks]:
        """Ask the workers for their stacks, and return those of the workers in `pids` by rank, empty ones if a worker does not answer.

        Wait for the answers until the next attempt begins or `is_over` returns true, at most `_ANSWER_S` seconds.
        """
        with self._changed:
            self._number, self._is_asking = self._number + 1, True
            self._loaders, self._processes = {}, {}
            attempt, deadline = self.attempt, time.monotonic() + _ANSWER_S
        self._ask(op="stacks", number=self._number)
        with self._changed:
            while attempt == self.attempt and not self._processes.keys() | self._ended >= pids.keys() and not is_over():
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _LOOK_S))
            self._is_asking = False
            return {rank: WorkerStacks(self._of(rank, pid), self._loaders.get(rank, [])) for rank, pid in pids.items()}

    def _of(self, rank: int, pid: int) -> ProcessStacks:
        if rank in self._processes:
            return self._processes[rank]
        return ProcessStacks(pid, "", "it has ended") if rank in self._ended else self._missing(pid)


def checked_values(values: Any) -> list[int]:
    """Return the values of a worker. Raises ValueError or TypeError if they cannot be such values."""
    if not isinstance(values, list) or len(values) != NUM_VALUES or not all(map(_is_count, values)):
        raise ValueError("a worker reports integers of 64 bits that are not negative")
    progress_in(values)
    return values


def _stacks_in(fields: Any) -> ProcessStacks:
    """Return the stacks in the `fields` of an answer. Raises TypeError or ValueError if they have another form."""
    process = ProcessStacks(**fields)
    texts = (process.stacks, process.why_silent, process.from_outside)
    if not isinstance(process.pid, int) or not all(isinstance(text, str) for text in texts):
        raise TypeError("a worker sends its process id and texts")
    for text in texts:
        text.encode()  # a text with half a surrogate pair could not be written to a file
    return process


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def answers_of(worker: WorkerStacks) -> Iterator[dict[str, Any]]:
    """Yield the messages for `WorkerReports.add` that have the stacks of a worker."""
    for number, process in worker.loaders:
        yield {"stacks": _fields_of(process), "loader": number}
    yield {"stacks": _fields_of(worker.process), "loader": None}


def _fields_of(process: ProcessStacks) -> dict[str, Any]:
    cut = {"stacks": end_of(process.stacks), "from_outside": _begin_of(process.from_outside)}
    return {**dataclasses.asdict(process), **cut}


def end_of(stacks: str) -> str:
    """Return the end of long stacks: faulthandler writes the main thread last."""
    return _begin_of(stacks[::-1])[::-1]


def _begin_of(text: str) -> str:
    begin = text[:_MOST_CHARACTERS]
    return begin if len(json.dumps(begin)) <= _MOST_BYTES else begin[:_FEWER_CHARACTERS]
