"""Send the progress and the stacks of training processes from the Ray workers to the launcher, which finds hangs and slow ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from distributed.backends._ray.rendezvous import LauncherConnections
from distributed.launching.heartbeat import NUM_VALUES, STACKS_SIGNAL, Board, Reports, progress_in
from distributed.launching.loader_stacks import LoaderProcess, WorkerStacks, stacks_of_workers
from distributed.launching.stacks import ProcessStacks

_REPORT_S = 0.5  # seconds between two reports of progress
_ANSWER_S = 15.0  # time for all workers to send their stacks
_MOST_CHARACTERS = 100_000  # of the stacks of one process, so that a line is shorter than `LINE_BYTES`


class ProcessReporter:
    """Report on the training process of a Ray worker, in a thread.

    Args:
        launcher: the connections to the launcher.
        process: the training process.
        board: the memory and the files that the process shares with this one, as worker 0.
    """

    def __init__(self, launcher: LauncherConnections, process: subprocess.Popen[bytes], board: Board) -> None:
        self._launcher, self._process, self._board = launcher, process, board
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._report, name="reports of a training process", daemon=True)

    def start(self) -> None:
        """Start reporting."""
        self._thread.start()

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
        with contextlib.suppress(OSError):  # the launcher has gone
            while True:
                try:
                    number = self._asked.get(timeout=_REPORT_S)
                except queue.Empty:
                    if (values := self._board.values(0)) != sent:
                        self._launcher.send(values=values)
                        sent = values
                    continue
                if number is None:
                    return
                self._answer(number)

    def _answer(self, number: int) -> None:
        found = stacks_of_workers(self._board.stacks, {0: self._process.pid}, self._ask)[0]
        for each in found.loaders:
            self._send(number, each.process, loader=each.number)
        self._send(number, found.process, loader=None)

    def _send(self, number: int, process: ProcessStacks, *, loader: int | None) -> None:
        cut = dataclasses.replace(
            process, stacks=_cut(process.stacks), from_outside=process.from_outside[:_MOST_CHARACTERS]
        )
        self._launcher.send(stacks=dataclasses.asdict(cut), number=number, loader=loader)

    def _ask(self) -> None:
        self._process.send_signal(STACKS_SIGNAL)


def _cut(stacks: str) -> str:
    """Return the end of long stacks: faulthandler writes the main thread last."""
    return stacks[-_MOST_CHARACTERS:]


class WorkerReports(Reports):
    """What the launcher knows of the workers of an attempt, by rank.

    One thread calls `begin` and `add`, others read.

    Args:
        ask: called with a command that all workers receive.
    """

    def __init__(self, ask: Callable[..., None]) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self._values: dict[int, list[int]] = {}
        self._crashes: dict[int, str] = {}
        self._number = 0  # of the newest request for stacks
        self._loaders: dict[int, list[LoaderProcess]] = {}  # those of the newest request
        self._processes: dict[int, ProcessStacks] = {}

    def begin(self) -> None:
        """Forget the workers of the attempt before."""
        with self._changed:
            self._values, self._crashes = {}, {}

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
        """Ask the workers for their stacks, and return those of the workers in `pids` by rank."""
        with self._changed:
            self._number += 1
            self._loaders, self._processes = {}, {}
        self._ask(op="stacks", number=self._number)
        with self._changed:
            self._changed.wait_for(lambda: self._processes.keys() >= pids.keys(), _ANSWER_S)
            return {
                rank: WorkerStacks(
                    self._processes.get(rank) or ProcessStacks(pid, "", "its Ray worker does not answer"),
                    self._loaders.get(rank, []),
                )
                for rank, pid in pids.items()
            }


def _checked(values: Any) -> list[int]:
    """Return the values of a worker. Raises ValueError or TypeError if they cannot be such values."""
    if not isinstance(values, list) or len(values) != NUM_VALUES or not all(type(each) is int for each in values):
        raise ValueError("a worker reports integers")
    progress_in(values)
    return values
