"""DeepSpeed as a module: for this device, without what it would compile or say on its own."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import timedelta
from typing import Any

from distributed.config.registry import import_library
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.request import LaunchRequest


def before_script(request: LaunchRequest, found: WorkerEnvironment, report: Any) -> None:
    """In a worker, before its script, which may be one of DeepSpeed's own: those of `Trainer` call `load` themselves."""
    prepare(request.device)


def prepare(device: str) -> Any:
    """The module `deepspeed`, for `device`."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.startswith("cuda") else "cpu")
    deepspeed = import_library("deepspeed", "deepspeed")
    # torch 2.13 renamed the collectives that DeepSpeed 0.19 calls, and says so at each of them.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Its all-reduce over shared memory is compiled for minutes at the first start, and a killed build is waited for without an
    # end by every later run; gloo's does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def load(device: str) -> Any:
    """The module `deepspeed`, for `device`, quiet: the display is ours."""
    deepspeed = prepare(device)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def limit_waits(timeout_s: float) -> None:
    """Give the groups that DeepSpeed made the time limit of ours: by themselves they wait half an hour."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
