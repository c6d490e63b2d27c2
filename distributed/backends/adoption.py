"""Groups that a script joined by its engine's own call are taken up. No engine is loaded to find out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.launching.request import WorkerEnvironment, worker_environment

if TYPE_CHECKING:
    from distributed.backends._torch.world import World


def adopted(warn: Callable[[str], None]) -> World | None:
    """The world of several processes that this one is in by torch's or Horovod's own call, or None."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return _torch_group(warn)
    joining = sys.modules.get("distributed.backends._horovod.world")
    if joining is not None and joining.is_left():
        return None
    hvd = sys.modules.get("horovod.torch")
    if hvd is not None and hasattr(hvd, "is_initialized") and hvd.is_initialized() and hvd.size() > 1:
        return _horovod(warn)
    return None


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


def _torch_group(warn: Callable[[str], None]) -> World:
    import torch
    import torch.distributed as dist

    from distributed.backends._torch.world import ProcessGroup

    size, rank = dist.get_world_size(), dist.get_rank()
    name = dist.get_backend()  # "undefined" where the script named none: torch then takes NCCL for GPUs
    is_cuda = torch.cuda.is_available() and ("nccl" in name or name == "undefined")
    found = worker_environment() or WorkerEnvironment(rank, rank, size, size, 0, "", 0, 0, "torch")
    if is_cuda:
        found = dataclasses.replace(found, local_rank=torch.cuda.current_device())
    plan = ProcessPlan(1, size, "cuda" if is_cuda else "cpu", "torch.distributed")
    return ProcessGroup(plan, DistributedConfig(), warn, found=found)


def _horovod(warn: Callable[[str], None]) -> World:
    import torch

    from distributed.backends._horovod.world import HorovodWorld

    hvd = sys.modules["horovod.torch"]
    local = hvd.local_size()
    device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    return HorovodWorld(ProcessPlan(hvd.size() // local, local, device, "horovod"), DistributedConfig(), warn)
