"""Run a function in a process whose descendants all end when the process or its caller ends.

Workaround (Ray 2.60, no upstream issue known; may go when all processes of a cluster end with it): some of Ray's
processes outlive a cluster that was killed, because they are descendants in sessions of their own. A subreaper between
the caller and the function inherits every orphan below it and kills what is left (Linux: PR_SET_CHILD_SUBREAPER).

The children are found in /proc, without psutil: the launcher does not depend on it (see `runs.processes`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.launching.forking import fork
from distributed.runs.processes import STOP_SIGNALS, stat_of
from distributed.state import OnEvent

_PR_SET_CHILD_SUBREAPER = 36


class Subreaper:
    """Run `work(on_event)` in a process below a subreaper. Create an instance only in a process with a single thread.

    Args:
        work: the function to run. Its argument `on_event` is a function that sends a JSON-able event to this process.
        log: the file that gets the output of `work` and of its child processes.
        scratch: a directory that is removed when all processes have ended, or None.
    """

    def __init__(self, work: Callable[[OnEvent], None], log: Path, scratch: Path | None) -> None:
        life, self._life = os.pipe()
        self.events, write = os.pipe()
        ends = (self._life, self.events)
        self._pid = fork(lambda: _keep(work, log, scratch, life, write, ends), dies_with_parent=False)
        os.close(life)
        os.close(write)
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Wait for events and return those since the last call. Return None once `work` has ended."""
        data = os.read(self.events, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines] if data else None

    def end(self) -> None:
        """Kill the processes that are left, and wait until all have ended."""
        os.close(self._life)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _keep(
    work: Callable[[OnEvent], None], log: Path, scratch: Path | None, life: int, write: int, ends: tuple[int, int]
) -> int:
    """Run the subreaper until `work` has ended or the other end of `life` is closed."""
    for fd in ends:
        os.close(fd)
    os.setsid()
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN if number != signal.SIGCHLD else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = fork(lambda: _work(work, log, life, write))
    os.close(write)
    select.select([life, os.pidfd_open(child)], [], [])
    _kill_all_below(os.getpid())
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


def _work(work: Callable[[OnEvent], None], log: Path, life: int, write: int) -> int:
    """Call `work` with its output in `log`."""
    os.close(life)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for target in (1, 2):
        os.dup2(fd, target)
    work(lambda event: _write(write, event))
    return 0


def _write(fd: int, event: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, json.dumps(event).encode() + b"\n")


def _kill_all_below(subreaper: int) -> None:
    """Kill the children of this process until none is left: the children of a killed child become children of this process."""
    while True:
        for pid in _children(subreaper):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (stat := stat_of(pid)) is not None and stat.parent == parent]
