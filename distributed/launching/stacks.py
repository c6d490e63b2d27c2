"""Ask the workers of a node for the stacks of their threads, and read from these stacks where a worker is."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distributed.launching.causes import is_users
from distributed.launching.pulse import Board

_ANSWER_S = 3.0  # time for a worker to answer
_PY_SPY_S = 5.0
_POLL_S = 0.05
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STDLIB = (sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib/python")
# The states of a process that cannot answer, as /proc has them. It may leave the last one at any moment.
_STOPPED = ("T", "t")
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for a device or a file system",
}


def collect(board: Board, pids: Mapping[int, int], ask: Callable[[], None]) -> dict[int, str]:
    """Return the stacks of workers, "" for those that do not answer. `pids` has their process ids, and `ask` sends the request."""
    before = {index: board.stacks_size(index) for index in pids}
    ask()
    sizes, deadline = dict(before), time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {index: board.stacks_size(index) for index in pids}
        # A stack is complete when it has not grown since the last look.
        if all(before[i] < now[i] == sizes[i] or _state_of(pids[i]) in _STOPPED for i in pids):
            break
        sizes = now
    return {index: board.stacks(index, begin) for index, begin in before.items()}


def why_silent(pid: int) -> str:
    """Return why a process cannot answer, or "" if it can or if that is not known."""
    return _STATES.get(_state_of(pid), "")


def _state_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def seen_from_outside(pid: int) -> str:
    """Return the stacks of a process that does not answer, as py-spy shows them, or "" if it is not installed or may not."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        return ""
    command = [found, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
        return done.stdout if done.returncode == 0 else ""
    return ""


def users_frame(stacks: str) -> str:
    """Return the file, the line and the function in which the main thread is, if that is code of the user, else "".

    Code of the user that calls Python's standard library counts. A worker that waits in a collective is in a library instead.
    """
    main = stacks.rpartition("hread 0x")[2]  # faulthandler writes the main thread last
    for name, line, function in _FRAME.findall(main):
        if is_users(name) and not name.startswith("<"):
            return f"{name}, line {line}, in {function}"
        is_of_python = name.startswith(_STDLIB) and "site-packages" not in name
        if not (is_of_python or name.startswith("<")):
            return ""
    return ""
