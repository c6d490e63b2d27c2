"""Keep how long a rank waited for others, per update. Loads no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class MeasuredWaits:
    """Keep the waiting times of measured updates for two readers: one asks at each log line, and one more often."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0  # since the last call of `take`
        self._new_sum, self._new_count = 0.0, 0  # since that of `take_new`
        self._newest: float | None = None

    def add(self, seconds: float) -> None:
        """Record how long a measured update has waited."""
        self._sum, self._count = self._sum + seconds, self._count + 1
        self._new_sum, self._new_count = self._new_sum + seconds, self._new_count + 1

    def take(self) -> float | None:
        """Return seconds per update since the last call, or the previous value if no update was measured since then."""
        if self._count:
            self._newest = self._sum / self._count
            self._sum, self._count = 0.0, 0
        return self._newest

    def take_new(self) -> float | None:
        """Return seconds per update since the last call, or None if no update was measured since then."""
        if not self._new_count:
            return None
        mean = self._new_sum / self._new_count
        self._new_sum, self._new_count = 0.0, 0
        return mean


class DDPWaits:
    """Compute the waiting times of one DistributedDataParallel from torch's own measurements.

    torch measures the first ten updates and then one in `every`, and reports only means since the start. The slow first updates would
    dominate these means for thousands of updates, so the times since the last call are computed from them.
    """

    def __init__(self, every: int = 100) -> None:
        self._every = every
        # Number of measured updates, and their total times in nanoseconds: for communication, and for the part of it
        # that overlaps with computation.
        self._count, self._exchange, self._overlap = 0, 0, 0
        self._newest: float | None = None

    def take(self, data: Mapping[str, Any]) -> float | None:
        """Return the result of `take_new`, or the previous value if no update was measured since the last call."""
        self.take_new(data)
        return self._newest

    def take_new(self, data: Mapping[str, Any]) -> float | None:
        """Return seconds per update, as the mean over the updates measured since the last call, or None if none was.

        `data` is the result of `_get_ddp_logging_data`: means in whole nanoseconds, and the last iteration that they include.
        """
        means = [data.get(f"avg_backward_{name}_time") for name in ("comm", "compute_comm_overlap")]
        iteration = data.get("iteration", 0)
        count = min(iteration, 10) + iteration // self._every - min(iteration, 10) // self._every
        if None in means or count <= self._count:
            return None
        exchange, overlap = (mean * count for mean in means)
        waited = exchange - self._exchange - (overlap - self._overlap)
        self._newest = max(waited, 0) / (count - self._count) / 1e9
        self._count, self._exchange, self._overlap = count, exchange, overlap
        return self._newest
