"""Import DeepSpeed for a device, and keep it from compiling operators and printing."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from datetime import timedelta
from typing import Any

from distributed.config.registry import import_library
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.request import LaunchRequest
from distributed.state import OnEvent


def before_script(request: LaunchRequest, found: WorkerEnvironment, on_event: OnEvent) -> None:
    """Prepare DeepSpeed in a worker before its script runs, because the script may call DeepSpeed itself. A `Trainer`
    calls `load` later."""
    prepare(request.device)


def warm_up(request: LaunchRequest) -> None:
    """Import DeepSpeed in the launcher, once for all workers on CPUs. On GPUs each worker imports it: the import
    may use the GPU, and a process that is forked afterwards could not use it."""
    if request.device == "cpu":
        with contextlib.suppress(Exception):  # a worker gets the same error and reports it with its rank
            prepare(request.device)
            # Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when it is imported only if it is used): the
            # first engine would import it, and with it torch's compiler, in more than a second.
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def prepare(device: str) -> Any:
    """Import and return the module `deepspeed`, set up for `device`."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if device.startswith("cuda") else "cpu")
    deepspeed = import_library("deepspeed", "deepspeed")
    # Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when DeepSpeed calls the new names): torch has
    # renamed the collectives that DeepSpeed calls, and warns at each call.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when DeepSpeed names the device): torch warns that a
    # barrier of DeepSpeed uses the current GPU, which is the right one.
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context", UserWarning)
    # Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#7625; may go when this all-reduce is compiled on request
    # only): DeepSpeed compiles its all-reduce over shared memory for minutes at the first start, and later runs wait
    # for ever for a killed build. gloo's all-reduce does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def load(device: str) -> Any:
    """Import and return the module `deepspeed`, set up for `device` and with its log limited to errors."""
    deepspeed = prepare(device)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def limit_waits(timeout_s: float) -> None:
    """Set our time limit on the process groups that DeepSpeed made.

    Workaround (DeepSpeed 0.19.8, no upstream issue known; may go when these groups take the limit of the default
    group): DeepSpeed gives them half an hour.
    """
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
