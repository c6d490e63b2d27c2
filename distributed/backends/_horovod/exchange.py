"""Wait for a collective of Horovod, and detect the ranks that do not join it."""

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
_GRACE_S = 1.0  # after a time limit, the time in which other ranks reach theirs too


@dataclasses.dataclass
class HorovodState:
    """State of Horovod in this process. Horovod starts once per process and runs until the process ends. If one rank
    shuts it down, it ends on all ranks."""

    store: Any = None
    timeout_s: float = math.inf
    server: Rendezvous | None = None
    is_left: bool = False


horovod_state = HorovodState()


class Reduction:
    """An all-reduce in progress."""

    def __init__(self, hvd: Any, handle: int, finish: Callable[[], None]) -> None:
        self._hvd, self._handle, self._finish = hvd, handle, finish

    def wait(self) -> None:
        """Wait for the result."""
        finished(self._hvd, self._handle)
        self._finish()


def finished(hvd: Any, handle: int) -> Any:
    """Wait for the collective `handle` and return its result.

    Workaround (Horovod 0.28.1, horovod/horovod#2101; may go when `hvd.synchronize` blocks without spinning): its wait
    spins since that change, which takes the core from the thread that does the work if there are no more cores than
    processes: 46 s instead of 5 s on two cores. Polling does not.

    Raises TrainingError with the ranks that did not join for `timeout_s` seconds.
    """
    deadline = time.monotonic() + horovod_state.timeout_s
    while not hvd.poll(handle):
        time.sleep(_POLL_S)
        if time.monotonic() > deadline:
            raise _stalled(hvd)
    return hvd.synchronize(handle)


def _stalled(hvd: Any) -> TrainingError:
    """Return an error that names the absent ranks.

    Workaround (Horovod 0.28.1, no upstream issue known; may go when Horovod's error names the absent ranks): Horovod
    reports them only in its own log. Each waiting rank therefore records its number in the store.
    """
    absent = "another rank has"
    if horovod_state.store is not None:
        waiting = messages(horovod_state.store, "stalled")
        waiting.set(str(hvd.rank()), "")
        time.sleep(_GRACE_S)
        ranks = [rank for rank in range(hvd.size()) if not waiting.check([str(rank)])]
        if ranks:
            absent = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'}"
    return TrainingError(
        f"{absent} not joined an exchange in which the others have waited for {horovod_state.timeout_s:g} s (timeout_s): it hangs, or"
        " it needs more time for a step"
    )
