"""Measure the seconds that training spends on data, computation, waiting for other ranks, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Reduce = Callable[[Mapping[Any, float]], Mapping[Any, float]]


class TimeSplit:
    """Add up the seconds of one rank since the last `take`. Reads the clock twice per update and never waits for a device."""

    def __init__(self) -> None:
        self.data = self.checkpoint = self.total = 0.0
        self.updates = 0

    def timed(self, items: Iterator[T]) -> Iterator[T]:
        """Yield each of `items`, and add the seconds that waiting for it took to `data`."""
        clock = time.perf_counter
        while True:
            began = clock()
            item = next(items, None)
            self.data += clock() - began
            if item is None:
                return
            yield item

    def take(self, communication_s: float | None, rank: int, world_size: int, reduce: Reduce) -> dict[str, float]:
        """Return the seconds per update since the last call. A collective.

        `step_s` is the sum of `data_s`, `compute_s`, `communication_s` and `checkpoint_s`, all means over the ranks.
        The argument `communication_s` is the time that this rank waited for the others. If it is None, because the engine does
        not measure it, the result has no `communication_s`, and the waiting counts as compute. `rank_0_s`, `rank_1_s` and so on
        are the seconds of data and compute of each rank.
        """
        updates = max(self.updates, 1)
        step, data, checkpoint = self.total / updates, self.data / updates, self.checkpoint / updates
        waited = min(communication_s or 0.0, max(step - data - checkpoint, 0.0))
        compute = max(step - data - checkpoint - waited, 0.0)
        mine = {
            "step_s": step, "data_s": data, "compute_s": compute, "communication_s": waited, "checkpoint_s": checkpoint,
        }  # fmt: skip
        ranks = {f"rank_{each}_s": data + compute if each == rank else 0.0 for each in range(world_size)}
        self.data = self.checkpoint = self.total = 0.0
        self.updates = 0
        sums = reduce({**mine, **ranks})
        if communication_s is None:
            del mine["communication_s"]
        return {name: sums[name] / (world_size if name in mine else 1) for name in (*mine, *ranks)}
