"""Signals and lifetimes of processes, as the launcher and its children use them.

psutil is not used: the launcher does not depend on it, and of these functions it could replace only `is_running` and `stat_of`.
psutil computes the start time of a process from the clock of the machine, so that the time changes when the clock is set. The start
in /proc never changes, and identifies the process in the files of a run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TextIO

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # after one of these signals, a run saves its state and ends
# With this signal the launcher makes the workers of a run save and end, so that the run goes on with another number of them. They
# ignore it while they do not train.
REGROUP_SIGNAL = signal.SIGUSR2

# The namespaces outside of containers (Linux: PROC_PID_INIT_INO, PROC_IPC_INIT_INO)
FIRST_NAMESPACES = {"pid": f"pid:[{0xEFFFFFFC}]", "ipc": f"ipc:[{0xEFFFFFFF}]"}

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15  # prctl(2)
_skips_teardown = False  # see `skip_teardown`


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process obeys. A process that `nohup` started does not obey SIGHUP."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number == signal.SIGHUP))


class _Interrupts:
    """Handle Ctrl-C as Python does, and record that Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(number, frame)


def keep_interrupts() -> None:
    """Record Ctrl-C from now on, so that `raise_kept` can raise it again if it was swallowed. Main thread only."""
    signal.signal(signal.SIGINT, _Interrupts())


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Record a Ctrl-C that is swallowed inside the block. `raise_kept` or the end of the block then raises it.

    Workaround (Cython 3.2, no upstream issue known; may go when Cython passes on what is raised while it registers its
    classes): the import of a C extension may swallow one, because Cython drops it. This has an effect only in the main
    thread, and if Ctrl-C has Python's own meaning.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = _Interrupts()
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts.has_come:
        raise KeyboardInterrupt


def raise_kept() -> None:
    """Raise KeyboardInterrupt if a recorded Ctrl-C was swallowed. Call this before anything that takes long."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupts) and handler.has_come:
        raise KeyboardInterrupt


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when process `parent` ends, or now if it has ended. Does nothing outside of Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Let `ps -A` and `top` show `name`, of at most 15 bytes, for this process. Does nothing outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def is_running(pid: int) -> bool:
    """Return whether process `pid` is running. A zombie is not. Return True if that cannot be determined."""
    if not Path("/proc/self/stat").exists():
        return True
    stat = stat_of(pid)
    return stat is not None and not stat.has_ended


class ProcessStat(NamedTuple):
    """Facts about a process from its file /proc/PID/stat (proc(5))."""

    state: str  # one letter, such as "R" or "T"
    parent: int  # the process id of the parent
    started: str  # clock ticks from the boot of the machine to the start of the process

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, and only waits for its parent to read its exit code."""
        return self.state in ("Z", "X")


def stat_of(pid: int) -> ProcessStat | None:
    """Return facts about process `pid`, or None if there is no such process or no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name of the program, in parentheses, may contain blanks
    return ProcessStat(fields[0], int(fields[1]), fields[19])


def identity_of(pid: int) -> str | None:
    """Return the identity of process `pid`: boot id, pid namespace, process id and start time. Return None if it has ended.

    Process ids are reused, also after a reboot and in each pid namespace.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    stat = stat_of(pid)
    return None if stat is None or stat.has_ended else f"{boot} {namespace} {pid} {stat.started}"


def descendants(pid: int) -> list[int]:
    """Return the processes that process `pid` or one of its descendants has started. Return none if there is no /proc."""
    entries = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    parents = {each: stat.parent for each in entries if (stat := stat_of(each)) is not None}
    found = [pid]
    for parent in found:
        found += [each for each, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def handles(pid: int, number: int) -> bool:
    """Return whether process `pid` has a handler for a signal, so that the signal does not end it."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*(\w+)", text, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def skip_teardown() -> None:
    """Let `leave` end this process without clearing its modules, which takes 0.4 s once torch is imported.

    For launchers, which import torch for their workers alone, and for processes that read files. Destructors and exit functions of C
    libraries do not run.
    """
    global _skips_teardown
    _skips_teardown = True


def leave(code: int) -> NoReturn:
    """Raise SystemExit with an exit code, from the last line of a program. See also `skip_teardown`."""
    if _skips_teardown:
        atexit.register(_end_at_once, code)
    sys.exit(code)


def _end_at_once(code: int) -> None:
    """Run the other exit functions, and end this process. If a stream cannot be flushed, let Python report the error."""
    try:
        for stream in _streams():
            stream.flush()
    except (OSError, ValueError):
        return
    atexit.unregister(_end_at_once)
    finish()
    os._exit(code & 0xFF)


def finish() -> None:
    """Wait for threads, call the exit functions, and flush the streams of Python and of C.

    The interpreter does the same at its end, but also clears the modules.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    flush()
    ctypes.CDLL(None).fflush(None)


def flush() -> None:
    """Flush the streams of Python. Do nothing if the script closed them, or if their reader has ended."""
    for stream in _streams():
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _streams() -> list[TextIO]:
    """Return the standard streams, and the original ones where the script has replaced them."""
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return [stream for stream in streams if stream is not None]  # None without a descriptor
