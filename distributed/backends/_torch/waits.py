"""What a rank waited for others under torch's DDP, whose own clock knows means since the beginning only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Waits:
    """Of one wrapper. torch reads its clock in the first ten updates and in one of a hundred, and the slow first ones would
    weigh on its means for thousands."""

    def __init__(self) -> None:
        self._count, self._exchange, self._overlap = 0, 0, 0  # measured updates, and nanoseconds of all of them
        self._newest: float | None = None

    def take(self, data: Mapping[str, Any]) -> float | None:
        """Seconds of an update, meaned over those that were measured since the last call; where none was, as at that one.

        `data` is what `_get_ddp_logging_data` says: means as whole nanoseconds, and the last update that is in them.
        """
        means = [data.get(f"avg_backward_{name}_time") for name in ("comm", "compute_comm_overlap")]
        count = min(data.get("iteration", 0), 10) + data.get("iteration", 0) // 100
        if None not in means and count > self._count:
            exchange, overlap = (mean * count for mean in means)
            waited = exchange - self._exchange - (overlap - self._overlap)
            self._newest = max(waited, 0) / (count - self._count) / 1e9
            self._count, self._exchange, self._overlap = count, exchange, overlap
        return self._newest
