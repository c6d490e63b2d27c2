"""Send the progress and the stacks of training processes from the Ray workers to the launcher, which finds hangs and slow ranks."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from typing import Any

from distributed.backends._ray.rendezvous import LauncherConnections
from distributed.launching.heartbeat import STACKS_SIGNAL, Board
from distributed.launching.loader_stacks import stacks_of_workers
from distributed.launching.stacks import ProcessStacks
from distributed.launching.worker_reports import answers_of, end_of
from distributed.runs.processes import handles, is_running

_REPORT_S = 0.5  # seconds between two reports of progress


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
        return {"values": self._board.values(0), "crash": end_of(self._board.crash(0))}

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
        for answer in answers_of(found):
            self._send(number=number, **answer)

    def _send(self, **answer: Any) -> None:
        with contextlib.suppress(OSError):  # the launcher has gone
            self._launcher.send(**answer)

    def _ask(self) -> None:
        if handles(self._process.pid, STACKS_SIGNAL):  # not yet while the process starts
            self._process.send_signal(STACKS_SIGNAL)


def missing(pid: int) -> ProcessStacks:
    """Return what takes the place of the stacks of a training process whose Ray worker does not answer."""
    return ProcessStacks(pid, "", "its Ray worker does not answer")
