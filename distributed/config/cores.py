"""Read how many cores this process may use, within the CPU limit of a container."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # in a container, its control group; otherwise a group without a limit


def num_cores() -> int:
    """Return the number of cores that this process may use, at least 1.

    It is the number of cores to which the process is bound, or less if the control group of a container allows less. A limit of
    1.5 cores counts as 2.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # no control group, or no limit ("max", or -1 in version 1)
        quota_us, period_us = map(int, _limit().split())
        if quota_us > 0:
            cores = min(cores, math.ceil(quota_us / period_us))
    return max(1, cores)


def cores_of_each(processes: int) -> int:
    """Return the share of `num_cores()` that each of `processes` processes has, at least 1."""
    return max(1, num_cores() // max(1, processes))


def cores_of_rank() -> int:
    """Return this process's share of `num_cores()`, at least 1, if it is one of the ranks on its node (LOCAL_WORLD_SIZE)."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores_of_each(int(ranks) if ranks.isdecimal() else 1)


def _limit() -> str:
    """Return the microseconds of CPU time that the control group may use in a period, and the length of the period."""
    with contextlib.suppress(FileNotFoundError):
        return (_GROUP / "cpu.max").read_text()
    version_1 = _GROUP / "cpu"
    return f"{(version_1 / 'cpu.cfs_quota_us').read_text()} {(version_1 / 'cpu.cfs_period_us').read_text()}"
