"""Measure how long a rank waits in the collectives that its engine begins, such as those of `fully_shard`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from distributed.backends._torch.waits import ALWAYS_MEASURED, MeasuredWaits, measured_every


class CollectiveTimer:
    """Add up the seconds that this rank is in collectives, in the updates that are measured.

    These are the first ten, and then one in ten on CPUs and one in a hundred on GPUs. In a measured update, no collective overlaps with
    computation: this rank first waits for what the device still computes, then begins the collective and waits for its end.
    """

    def __init__(self, device: torch.device) -> None:
        self.waits = MeasuredWaits()
        self._device, self._every = device, measured_every(device.type)
        self._num_updates, self._seconds = 0, 0.0
        self._is_measuring = False

    def begin_update(self) -> None:
        """Begin an update, which may be one that is measured."""
        number = self._num_updates
        self._num_updates, self._seconds = number + 1, 0.0
        self._is_measuring = number < ALWAYS_MEASURED or number % self._every == 0

    def end_update(self) -> None:
        """End an update, and record its seconds in `waits` if it was measured."""
        if self._is_measuring:
            self._is_measuring = False
            self.waits.add(self._seconds)

    def add(self, seconds: float) -> None:
        """Add seconds that this rank has waited in the current update otherwise."""
        self._seconds += seconds

    def run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `collective` with the other arguments. Return its result, which is a `Work` if the caller is to wait for it."""
        if not self._is_measuring:
            return collective(*args, **kwargs)
        self._wait_for_device()
        self._is_measuring, began = False, time.perf_counter()  # a collective may call others, which are in its time
        try:
            work = collective(*args, **kwargs)
            if hasattr(work, "wait"):
                work.wait()
            self._wait_for_device()
        finally:
            self._is_measuring = True
        self._seconds += time.perf_counter() - began
        return work

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
