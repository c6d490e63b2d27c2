"""An exchange of Horovod in progress, and how a rank detects that others do not join it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

from distributed.backends._horovod.rendezvous import Rendezvous
from distributed.errors import TrainingError
from distributed.launching.secret import messages

_POLL_S = 0.0001
_GRACE_S = 1.0  # time in which the waits of other ranks end too


@dataclasses.dataclass
class ThisProcess:
    """State of Horovod in this process. Horovod starts once per process and lives as long; a rank that shuts it down
    ends it for all."""

    store: Any = None
    timeout_s: float = math.inf
    server: Rendezvous | None = None
    is_left: bool = False


this_process = ThisProcess()


class Reduction:
    """An all-reduce in progress."""

    def __init__(self, hvd: Any, handle: int, finish: Callable[[], None]) -> None:
        self._hvd, self._handle, self._finish = hvd, handle, finish

    def wait(self) -> None:
        """Wait for the result."""
        finished(self._hvd, self._handle)
        self._finish()


def finished(hvd: Any, handle: int) -> Any:
    """Wait for the exchange `handle` and return its result.

    The wait of Horovod 0.28 spins, which takes the core from the thread that does the work if there are no more cores
    than processes: 46 s instead of 5 s on two cores. Polling can go when `hvd.synchronize` blocks without spinning.

    Raises TrainingError with the ranks that did not join for `timeout_s` seconds.
    """
    deadline = time.monotonic() + this_process.timeout_s
    while not hvd.poll(handle):
        time.sleep(_POLL_S)
        if time.monotonic() > deadline:
            raise _stalled(hvd)
    return hvd.synchronize(handle)


def _stalled(hvd: Any) -> TrainingError:
    """Return an error that names the absent ranks. Each waiting rank notes itself in the store. Horovod reports
    absent ranks only in its own log."""
    absent = "another rank has"
    if this_process.store is not None:
        waiting = messages(this_process.store, "stalled")
        waiting.set(str(hvd.rank()), "")
        time.sleep(_GRACE_S)
        ranks = [rank for rank in range(hvd.size()) if not waiting.check([str(rank)])]
        if ranks:
            absent = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'}"
    return TrainingError(
        f"{absent} not joined an exchange in which the others have waited for {this_process.timeout_s:g} s (timeout_s): it hangs, or"
        " it needs more time for a step"
    )
