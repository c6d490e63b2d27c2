"""Environment variables that a launcher sets unless the user has: the number of threads of a process, and variables of engines."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distributed.config.cores import cores_of_each, num_cores

_MOST_PER_CORE = 4  # a start with more processes per core shows a warning
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def thread_count(local_processes: int) -> int:
    """Return the number of threads for each process of this machine: OMP_NUM_THREADS if set, otherwise its share of the cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        return int(threads)
    return cores_of_each(local_processes)


def crowding(local_processes: int) -> str | None:
    """Return a warning if this machine is to run far more processes than it has cores, else None."""
    cores = num_cores()
    if local_processes <= _MOST_PER_CORE * cores:
        return None
    return (
        f"{local_processes} processes share {cores} core{'s' * (cores > 1)}, more than {_MOST_PER_CORE} on each:"
        " they start slowly and wait for each other; lower --nproc-per-node"
    )


def set_missing(environ: Mapping[str, str]) -> None:
    """Set the variables of `environ` that the user has not set."""
    for name, value in environ.items():
        os.environ.setdefault(name, value)


def set_thread_variables(local_processes: int) -> None:
    """Set the number of threads of each process to its share of the cores, unless the user has set it."""
    threads = str(thread_count(local_processes))
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, threads)
