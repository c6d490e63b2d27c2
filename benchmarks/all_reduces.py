"""Counts the all-reduces that a piece of training starts, with torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def count_all_reduces(work: Callable[[], object]) -> int:
    """How many all-reduces this rank starts while `work()` runs. Every rank must run the same `work`.

    Counted where torch hands them to the process group, so DDP's own (one per bucket) are among them.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key == "c10d::allreduce_")
