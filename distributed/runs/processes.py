"""Signals and lifetimes of processes, as the launcher and its children use them."""

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

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # after one of them a run saves and ends

_PR_SET_PDEATHSIG = 1


def heeded_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process obeys. A process that `nohup` started does not obey SIGHUP."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number == signal.SIGHUP))


class _Interrupts:
    """Handle Ctrl-C as Python does, and remember that there was one."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        signal.default_int_handler(number, frame)


def keep_interrupts() -> None:
    """Make `raise_kept` raise a Ctrl-C that was swallowed after this call. Main thread only."""
    signal.signal(signal.SIGINT, _Interrupts())


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Keep a Ctrl-C that is swallowed inside the block: `raise_kept` raises it, or the end of the block.

    The import of a C extension may swallow one: Cython drops what is raised while it registers its classes. This has
    an effect only in the main thread, and if Ctrl-C has Python's own meaning.
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
    """Raise KeyboardInterrupt for a Ctrl-C that was swallowed. Call it before anything that takes long."""
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
    """Return whether process `pid` runs. A zombie does not. Return True if that cannot be determined."""
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
