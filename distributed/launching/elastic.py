"""Elastic runs: how many workers this node starts, and when missing workers or nodes are added."""

from __future__ import annotations

import time

from distributed.launching.request import LaunchRequest

_ASK_EVERY_S = 1.0  # seconds between two requests to end, because workers that do not train yet ignore the signal


class WorkerCount:
    """Decide how many workers this node starts in the next attempt, and when an attempt ends early to start more of them.

    On one node, the run goes on without killed workers. With several nodes, the number of workers on each node is fixed, and the
    run goes on without lost nodes.
    """

    def __init__(self, request: LaunchRequest) -> None:
        self._most = request.nproc_per_node
        self._fewest = request.min_nproc_per_node or self._most
        self._interval_s = request.elastic_interval_s
        self._began = self._asked = time.monotonic()
        self._is_growing = False
        self._now = self._most

    def begin(self) -> int:
        """Begin an attempt and return its number of workers."""
        if self._is_growing:
            self._now, self._is_growing = self._most, False
        self._began = time.monotonic()
        return self._now

    def shrink(self, lost: int) -> int:
        """Remove `lost` workers and return the number of workers of the next attempt, or 0 if too few are left."""
        if self._now - lost < self._fewest:
            return 0
        self._now -= lost
        self._is_growing = False
        return self._now

    def may_grow(self, num_newcomers: int, *, has_saved: bool) -> bool:
        """Return whether the workers should save and end now, so that more can be started. Return True at most once per second.

        Args:
            num_newcomers: how many nodes are waiting. They take part after the next save, or after `elastic_interval_s`.
            has_saved: whether this attempt has saved a checkpoint.
        """
        now = time.monotonic()
        if not num_newcomers and self._now == self._most:
            return False
        is_time = now - self._began >= self._interval_s or (num_newcomers > 0 and has_saved)
        if not is_time or now - self._asked < _ASK_EVERY_S:
            return False
        self._asked, self._is_growing = now, True
        return True
