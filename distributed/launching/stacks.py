"""Ask processes of a node for the stacks of their threads, and read from these stacks where a process is."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing.process
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distributed.config.registry import REGISTRY
from distributed.launching.causes import is_ours, is_users
from distributed.launching.heartbeat import read_stacks
from distributed.runs.processes import stat_of

_ANSWER_S = 3.0  # time for a worker to answer
_PY_SPY_S = 5.0
_POLL_S = 0.05
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_WRAPPERS = ("wrapper", "inner")  # what decorators call the function that they return
_PROCESS = multiprocessing.process.__file__  # a child process begins in its function `_bootstrap`
_STDLIB = (sysconfig.get_path("stdlib"), f"{sys.base_prefix}/lib/python")
# State letters in /proc of processes that cannot answer. A process may leave the state D at any moment.
_STOPPED = ("T", "t")
_STATES = {
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "D": "it waits for a device or a file system",
}


@dataclasses.dataclass(frozen=True)
class ProcessStacks:
    """Answer of a process to the request for its stacks.

    Attributes:
        pid: the process id.
        stacks: the stacks of its threads, or "" if it did not answer.
        why_silent: why it did not answer, or "" if it did or if that is not known.
        from_outside: the stacks that py-spy sees if it did not answer, or "".
        was_asked: False if its launcher has not answered, so that it is not known whether the process would.
    """

    pid: int
    stacks: str
    why_silent: str = ""
    from_outside: str = ""
    was_asked: bool = True

    @classmethod
    def of(cls, pid: int, stacks: str) -> ProcessStacks:
        """Return the answer of a process of this node. If it did not answer, look at it from outside."""
        return cls(pid, stacks) if stacks else cls(pid, "", why_silent(pid), seen_from_outside(pid))

    @property
    def why(self) -> str:
        """The line of the user's code at which the process is, or why it did not answer, after a comma, or ""."""
        line = line_in_script(self.stacks)
        reason = line and f"it is at {line}" if self.stacks else self.why_silent
        return f", {reason}" if reason else ""

    @property
    def text(self) -> str:
        """The stacks, or a text that replaces them."""
        if self.stacks:
            return self.stacks
        more = self.from_outside or "py-spy (pip install py-spy) may show its stacks from outside.\n"
        return f"The process did not answer: {self.why_silent or 'the reason is not known'}.\n\n{more}"


def collect(fds: Mapping[int, int], pids: Mapping[int, int], ask: Callable[[], None]) -> dict[int, str]:
    """Return the stacks of processes, "" for those that do not answer.

    Args:
        fds: the descriptors of the files into which the processes write their stacks, by any key.
        pids: the process ids, by the same keys.
        ask: called to send the request.
    """
    before = {key: os.fstat(fds[key]).st_size for key in pids}
    ask()
    sizes, deadline = dict(before), time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {key: os.fstat(fds[key]).st_size for key in pids}
        # A stack is complete when it has not grown since the last look.
        if all(before[i] < now[i] == sizes[i] or _state_of(pids[i]) in _STOPPED for i in pids):
            break
        sizes = now
    return {key: read_stacks(fds[key], begin) for key, begin in before.items()}


def why_silent(pid: int) -> str:
    """Return why a process cannot answer, or "" if it can or if that is not known."""
    return _STATES.get(_state_of(pid), "")


def _state_of(pid: int) -> str:
    stat = stat_of(pid)
    return "" if stat is None else stat.state


def seen_from_outside(pid: int) -> str:
    """Return the stacks of a process that does not answer, as py-spy shows them.

    Return "" if py-spy is not installed or may not read the process.
    """
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        return ""
    command = [found, "dump", "--nonblocking", "--pid", str(pid)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PY_SPY_S)
        return done.stdout if done.returncode == 0 else ""
    return ""


def line_in_script(stacks: str) -> str:
    """Return the file, the line and the function of the user's code in which the main thread is, or ""."""
    found = next((frame for frame in _frames(stacks) if is_users(frame[0])), None)
    return "" if found is None else f"{found[0]}, line {found[1]}, in {found[2]}"


def waits_in(stacks: str) -> str:
    """Return the function in which the main thread waits for other ranks, such as "all_reduce", or "" if it does not wait for them.

    It is a function of a library that communicates, or of this package.
    """
    inside = list(itertools.takewhile(lambda frame: not is_users(frame[0]), _frames(stacks)))
    files = [part for entry in REGISTRY.values() for part in entry.waits_in]
    first = next((i for i, (name, _, _) in enumerate(inside) if any(part in name for part in files)), None)
    if first is None and not (inside and is_ours(inside[0][0])):
        return ""
    names = [function for _, _, function in inside[first or 0 :]]
    return next((name for name in names if not name.startswith("_") and name not in _WRAPPERS), names[0])


def passes_batches(stacks: str) -> bool:
    """Return whether the main thread of a rank waits for a loader process, or that of a loader process for its rank."""
    files = [part for entry in REGISTRY.values() for part in entry.loads_in]
    innermost = next((name for name, _, _ in _frames(stacks)), "")
    return any(part in innermost for part in files)


def _frames(stacks: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of each frame of the main thread, innermost first, without those of Python's own library.

    A process that was forked has the frames of its parent too, which are left out.
    """
    main = stacks.rpartition("hread 0x")[2]  # faulthandler writes the main thread last
    frames: list[tuple[str, str, str]] = _FRAME.findall(main)
    own = itertools.takewhile(lambda frame: not (frame[0] == _PROCESS and frame[2] == "_bootstrap"), frames)
    return [frame for frame in own if not frame[0].startswith("<") and not _is_pythons(frame[0])]


def _is_pythons(name: str) -> bool:
    return name.startswith(_STDLIB) and "-packages" not in name
