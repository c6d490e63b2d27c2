"""Whether a script has joined other processes by an engine's own call. No engine is loaded to find out."""

from __future__ import annotations

import sys


def has_joined() -> bool:
    """Whether the script of this process has joined others by an engine's own call, now or before. Loads no engine."""
    if any(name in sys.modules for name in _JOINING):
        return True
    return _has_joined_torch() or _has_joined_tensorflow()


# Modules that only a script imports, and only to join others.
_JOINING = ("horovod.common.basics", "mpi4py.MPI", "ray")


def _has_joined_torch() -> bool:
    """By `torch.distributed.init_process_group`. A group that was left again is known by what it leaves behind: torch keeps
    how it was made, unless a store was given, and the hook that prefixes tracebacks with the rank."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return False
    was_made = getattr(c10d, "_default_pg_init_method", None) is not None
    return was_made or bool(c10d.is_initialized()) or getattr(sys.excepthook, "__module__", "") == c10d.__name__


def _has_joined_tensorflow() -> bool:
    """By a strategy, or a server, of a cluster of several tasks."""
    module = sys.modules.get("tensorflow.python.eager.context")
    context = getattr(module, "_context", None)
    server = getattr(context, "_server_def", None) or getattr(context, "_collective_ops_server_def", None)
    if server is None or sum(len(job.tasks) for job in server.cluster.job) < 2:
        return False
    start = sys.modules.get("distributed.backends._tensorflow.start")
    return start is None or bool(start.is_used_by_script())
