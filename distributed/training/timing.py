"""Where the time of training goes: for data, computing, waiting for other ranks, and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Reduce = Callable[[Mapping[Any, float]], Mapping[Any, float]]


class TimeSplit:
    """Seconds of one rank since the last `take`. Reads the clock twice per update, and never waits for a device."""

    def __init__(self) -> None:
        self.data = self.checkpoint = self.total = 0.0
        self.updates = 0

    def timed(self, groups: Iterator[T]) -> Iterator[T]:
        """`groups`, and what waiting for each of them took."""
        clock = time.perf_counter
        while True:
            began = clock()
            group = next(groups, None)
            self.data += clock() - began
            if group is None:
                return
            yield group

    def take(self, communication_s: float | None, rank: int, world_size: int, reduce: Reduce) -> dict[str, float]:
        """Seconds per update since the last call. A collective.

        `step_s` is the sum of `data_s`, `compute_s`, `communication_s` and `checkpoint_s`, all means over the ranks.
        `communication_s`, in and out, is what a rank waited for others; None and absent where its engine does not measure
        that, and then it counts as compute. `rank_0_s`, `rank_1_s`, ...: what each rank needed by itself, data and compute.
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
