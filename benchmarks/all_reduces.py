"""Count the all-reduces that a piece of training starts, with torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def count_all_reduces(work: Callable[[], object]) -> int:
    """Return how many all-reduces this rank starts while `work()` runs. Every rank must run the same `work`.

    They are counted where torch passes them to the process group, so those of DDP (one per bucket) are included.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    return sum(event.count for event in profiler.key_averages() if event.key == "c10d::allreduce_")
