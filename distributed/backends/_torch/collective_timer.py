"""Measure how long a rank waits in the collectives that its engine begins, such as those of `fully_shard`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from distributed.backends._torch.waits import MeasuredWaits


class CollectiveTimer:
    """Add up the seconds of each update in which this rank waits in collectives, and add them to `waits`.

    Only for CPUs, where a collective keeps the process waiting. On a GPU it is the device that waits, while the process goes on.
    """

    def __init__(self, waits: MeasuredWaits) -> None:
        self._waits, self._seconds = waits, 0.0
        self._is_on = False

    def begin_update(self) -> None:
        self._is_on, self._seconds = True, 0.0

    def end_update(self) -> None:
        self._is_on = False
        self._waits.add(self._seconds)

    def add(self, seconds: float) -> None:
        """Add seconds that this rank has waited in the current update otherwise."""
        self._seconds += seconds

    def run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `collective` with the other arguments, and return its result. Between updates, nothing is measured."""
        if not self._is_on:
            return collective(*args, **kwargs)
        self._is_on, began = False, time.perf_counter()  # a collective may call others, whose time is in its own
        try:
            return collective(*args, **kwargs)
        finally:
            self._is_on = True
            self._seconds += time.perf_counter() - began
