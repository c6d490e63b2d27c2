"""Measure how long a rank waits in DeepSpeed's collectives."""

from __future__ import annotations

import functools
from typing import Any

from distributed.backends._torch.collective_timer import CollectiveTimer

# Methods of DeepSpeed's communication backend in which a rank may wait for the others. `deepspeed.comm` calls nothing else.
_COLLECTIVES = (
    "all_gather", "all_gather_base", "all_gather_coalesced", "all_gather_into_tensor", "all_reduce", "all_reduce_coalesced",
    "all_to_all", "all_to_all_single", "barrier", "broadcast", "inference_all_reduce", "reduce", "reduce_scatter",
    "reduce_scatter_tensor",
)  # fmt: skip


class MeasuredCollectives:
    """Let `timer` run DeepSpeed's collectives until `release`. It changes no result.

    Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when DeepSpeed measures its collectives on request): its own
    log of collectives does not wait for those that go on in the background.
    """

    def __init__(self, timer: CollectiveTimer) -> None:
        from deepspeed.comm import comm

        self._communicator: Any = comm.cdb
        self._names = [name for name in _COLLECTIVES if hasattr(self._communicator, name)]
        for name in self._names:
            setattr(self._communicator, name, functools.partial(timer.run, getattr(self._communicator, name)))

    def release(self) -> None:
        for name in self._names:
            delattr(self._communicator, name)
