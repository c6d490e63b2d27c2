"""Fork a child process that by default dies with its parent, exits with a chosen code, and always shows its errors."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator

from distributed.runs.processes import STOP_SIGNALS, die_with_parent, skip_teardown


def fork(child: Callable[[], int], *, dies_with_parent: bool = True) -> int:
    """Fork a process that calls `child` and exits with the code that `child` returns. Return the process id.

    The stop signals and SIGCHLD are blocked in the new process until it unblocks them. Otherwise, before it has handlers of its
    own, these signals would be written to a wake-up descriptor that it shares with this process. Call this from a process with a
    single thread.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGCHLD))
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    code = 1
    try:
        if dies_with_parent:
            die_with_parent(parent)
        code = child()
    except KeyboardInterrupt:  # a Ctrl-C that came before the script began
        code = 128 + signal.SIGINT
    except BaseException:  # the top frame of a process: show it, whatever it is
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def shared_imports() -> Iterator[None]:
    """Import modules in this block for the processes that this process forks, in memory that they share with it.

    Imports leave little garbage, and a garbage collection would copy memory pages that the children share. The collector therefore
    stays off in this process. The children call `gc.enable()`.
    """
    skip_teardown()
    gc.disable()
    yield
    gc.freeze()
