"""Small facts about processes that the launcher and its children share."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # save and leave

_PR_SET_PDEATHSIG = 1


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that mean something here: the end of the terminal does not to what `nohup` started."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number == signal.SIGHUP))


class _Interrupts:
    """Python's own meaning of Ctrl-C, which remembers that there was one."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(number, frame)


def keep_interrupts() -> None:
    """From here on `raise_kept` raises a Ctrl-C that something swallowed. Main thread only."""
    signal.signal(signal.SIGINT, _Interrupts())


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """A Ctrl-C within it is raised by `raise_kept`, or at its end, where nobody heard of it: the import of a C extension may swallow
    it (Cython's drops what is raised while it registers its classes). Only in the main thread, and where Ctrl-C has Python's own
    meaning."""
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
    """KeyboardInterrupt for a Ctrl-C that `interrupts_kept` has around it and something swallowed: before what takes long."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Interrupts) and handler.has_come:
        raise KeyboardInterrupt


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, or already has. Linux only; else nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether process `pid` lives; one that only waits to be reaped does not. True where that cannot be seen."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def flush_c_streams() -> None:
    """Flush what C libraries printed; os._exit does not."""
    ctypes.CDLL(None).fflush(None)
