"""Send the progress and the stacks of training processes from the Ray workers to the launcher, which finds hangs and slow ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed.backends._ray.rendezvous import LauncherConnections
from distributed.launching.heartbeat import NUM_VALUES, STACKS_SIGNAL, Board, Reports, progress_in
from distributed.launching.loader_stacks import LoaderProcess, WorkerStacks, stacks_of_workers
from distributed.launching.stacks import ProcessStacks
from distributed.runs.processes import handles, is_running

_REPORT_S = 0.5  # seconds between two reports of progress
_ANSWER_S = 30.0  # time for all workers to send their stacks, also if py-spy has to look at some processes from outside
_MOST_CHARACTERS = 100_000  # of the stacks of one process, so that a line is shorter than `LINE_BYTES`


class ProcessReporter:
    """Report on the training process of a Ray worker, in a thread.

    A report of progress is sent only when the launcher has read the one before, because a launcher that is stopped reads nothing, and
    the system ends a connection whose buffers are full.

    Args:
        launcher: the connections to the launcher.
        process: the training process.
        board: the memory and the files that the process shares with this one, as worker 0.
    """

    def __init__(self, launcher: LauncherConnections, process: subprocess.Popen[bytes], board: Board) -> None:
        self._launcher, self._process, self._board = launcher, process, board
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_seen = True  # whether the launcher has read the newest report of progress
        self._thread = threading.Thread(target=self._report, name="reports of a training process", daemon=True)

    def start(self) -> None:
        """Start reporting."""
        self._thread.start()

    def go_on(self) -> None:
        """Send the next report of progress when there is one: the launcher has read the last one."""
        self._is_seen = True

    def send_stacks(self, number: int) -> None:
        """Send the stacks of the process and of its loader processes, as answer `number`. Returns at once."""
        self._asked.put(number)

    def end(self) -> dict[str, Any]:
        """Stop reporting, after the process has ended. Return its last values and the stacks of a crash."""
        self._asked.put(None)
        self._thread.join()
        return {"values": self._board.values(0), "crash": _cut(self._board.crash(0))}

    def _report(self) -> None:
        sent: list[int] = []
        while True:
            try:
                number = self._asked.get(timeout=_REPORT_S)
            except queue.Empty:
                if self._is_seen and (values := self._board.values(0)) != sent:
                    sent, self._is_seen = values, False
                    self._send(values=values)
                continue
            if number is None:
                return
            self._answer(number)

    def _answer(self, number: int) -> None:
        pid = self._process.pid
        found = stacks_of_workers(self._board.stacks, {0: pid}, self._ask)[0]
        if not is_running(pid):
            return  # the launcher gets the exit status instead
        for each in found.loaders:
            self._send(stacks=_fields_of(each.process), number=number, loader=each.number)
        self._send(stacks=_fields_of(found.process), number=number, loader=None)

    def _send(self, **answer: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher has gone
            self._launcher.send(**answer)

    def _ask(self) -> None:
        if handles(self._process.pid, STACKS_SIGNAL):  # not yet while the process starts
            self._process.send_signal(STACKS_SIGNAL)


def _fields_of(process: ProcessStacks) -> dict[str, Any]:
    cut = {"stacks": _cut(process.stacks), "from_outside": process.from_outside[:_MOST_CHARACTERS]}
    return {**dataclasses.asdict(process), **cut}


def _cut(stacks: str) -> str:
    """Return the end of long stacks: faulthandler writes the main thread last."""
    return stacks[-_MOST_CHARACTERS:]


class WorkerReports(Reports):
    """Keep the reports of the Ray workers of an attempt, by rank.

    One thread calls `begin`, `add` and `end`, others read.

    Args:
        ask: called with a command that all workers receive.

    Attributes:
        attempt: the number of attempts that have begun.
    """

    def __init__(self, ask: Callable[..., None]) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._values: dict[int, list[int]] = {}
        self._crashes: dict[int, str] = {}
        self._number = 0  # of the newest request for stacks
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
                self._values[rank] = _checked(answer["values"])
            if answer.get("crash"):
                self._crashes[rank] = str(answer["crash"])
            if "stacks" in answer and answer["number"] == self._number:
                process = ProcessStacks(**answer["stacks"])
                if answer["loader"] is not None:
                    self._loaders.setdefault(rank, []).append(LoaderProcess(int(answer["loader"]), process))
                else:  # the last one of this worker
                    self._processes[rank] = process
                    self._changed.notify_all()

    def inspect(self, pids: Mapping[int, int]) -> dict[int, WorkerStacks]:
        """Ask the workers for their stacks, and return those of the workers in `pids` by rank.

        Wait for the answers until the next attempt begins, at most `_ANSWER_S` seconds.
        """
        with self._changed:
            self._number += 1
            self._loaders, self._processes = {}, {}
            attempt = self.attempt
        self._ask(op="stacks", number=self._number)
        with self._changed:
            self._changed.wait_for(
                lambda: attempt != self.attempt or self._processes.keys() | self._ended >= pids.keys(), _ANSWER_S
            )
            return {rank: WorkerStacks(self._of(rank, pid), self._loaders.get(rank, [])) for rank, pid in pids.items()}

    def _of(self, rank: int, pid: int) -> ProcessStacks:
        why = "it has ended" if rank in self._ended else "its Ray worker does not answer"
        return self._processes.get(rank) or ProcessStacks(pid, "", why)


def _checked(values: Any) -> list[int]:
    """Return the values of a worker. Raises ValueError or TypeError if they cannot be such values."""
    if not isinstance(values, list) or len(values) != NUM_VALUES or not all(map(_is_int64, values)):
        raise ValueError("a worker reports integers of 64 bits")
    progress_in(values)
    return values


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63
