"""Small facts about processes that the launcher and its children share."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # save and leave

_PR_SET_PDEATHSIG = 1


def heeded_signals() -> tuple[signal.Signals, ...]:
    """The stop signals that mean something here: the end of the terminal does not to what `nohup` started."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (is_deaf and number == signal.SIGHUP))


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
