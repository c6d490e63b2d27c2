"""Measure how long a rank waits in DeepSpeed's collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from distributed.backends._torch.collective_timer import CollectiveTimer

# Methods of DeepSpeed's communication object in which a rank may wait for all others.
_COLLECTIVES = (
    "all_gather", "all_gather_base", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "barrier", "broadcast", "inference_all_reduce", "reduce", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip


class MeasuredCollectives:
    """Let `timer` run DeepSpeed's collectives until `release`, and the waiting for those that go on in the background.

    Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when DeepSpeed's own log of collectives has the time until a
    collective that goes on in the background has ended).
    """

    def __init__(self, timer: CollectiveTimer) -> None:
        from deepspeed.comm import comm

        self._communicator: Any = comm.cdb
        self._names = [name for name in _COLLECTIVES if hasattr(self._communicator, name)]
        for name in self._names:
            setattr(self._communicator, name, _measured(timer, getattr(self._communicator, name)))

    def release(self) -> None:
        for name in self._names:
            delattr(self._communicator, name)


def _measured(timer: CollectiveTimer, collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        work = timer.run(collective, *args, **kwargs)
        return _Work(timer, work) if hasattr(work, "wait") else work

    return run


class _Work:
    """A collective that goes on in the background."""

    def __init__(self, timer: CollectiveTimer, work: Any) -> None:
        self._timer, self._work = timer, work

    def wait(self, *args: Any) -> Any:
        return self._timer.run(self._work.wait, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
