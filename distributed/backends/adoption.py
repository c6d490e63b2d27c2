"""Adopt the process group that a script joined by calling torch or Horovod itself. Loads no engine to find out."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld


def adopted(warn: Callable[[str], None]) -> TorchWorld | None:
    """Return the world that this process joined by calling torch or Horovod itself, or None. `warn` is called with warnings."""
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


def _torch_group(warn: Callable[[str], None]) -> TorchWorld:
    import torch
    import torch.distributed as dist

    from distributed.backends._torch.world import ProcessGroup

    size, rank = dist.get_world_size(), dist.get_rank()
    name = dist.get_backend()  # "undefined" if the script named none: torch then uses NCCL for GPUs
    is_cuda = torch.cuda.is_available() and ("nccl" in name or name == "undefined")
    found = worker_environment() or WorkerEnvironment(rank, rank, size, size, 0, "", 0, 0, "torch")
    if is_cuda:
        found = dataclasses.replace(found, local_rank=torch.cuda.current_device())
    plan = ProcessPlan(1, size, "cuda" if is_cuda else "cpu", "torch.distributed")
    return ProcessGroup(plan, DistributedConfig(), warn, found=found)


def _horovod(warn: Callable[[str], None]) -> TorchWorld:
    import torch

    from distributed.backends._horovod.world import HorovodWorld

    hvd = sys.modules["horovod.torch"]
    local = hvd.local_size()
    device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    return HorovodWorld(ProcessPlan(hvd.size() // local, local, device, "horovod"), DistributedConfig(), warn)
