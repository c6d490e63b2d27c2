"""One Trainer and one DistributedConfig for every engine. Public names are imported on first use, so this module loads no framework."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.backends.exporting import export
    from distributed.backends.weights import load_weights
    from distributed.callbacks import Callback, EarlyStopping
    from distributed.comm import (
        ReduceOp,
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        destroy_process_group,
        get_distributed_info,
        get_rank,
        get_world_size,
        init_process_group,
        is_initialized,
        no_sync,
        reduce_scatter,
    )
    from distributed.comm.parallel import DistributedDataParallel, DistributedSampler
    from distributed.config import DistributedConfig
    from distributed.errors import (
        CheckpointError,
        ConfigError,
        DistributedError,
        ResourceError,
        TrainingError,
        TrainingInterrupted,
    )
    from distributed.finders.curve import LearningRateCurve
    from distributed.gradient_checkpointing import checkpoint_scope, memory_pool_scope
    from distributed.launcher import DistributedLauncher, LaunchConfig, launch_distributed_training
    from distributed.loggers.logger import Logger
    from distributed.metrics import over_all
    from distributed.runs.history import History
    from distributed.trainer import (
        DeepSpeedTrainer,
        FSDPTrainer,
        HorovodTrainer,
        PyTorchDDPTrainer,
        RayTrainer,
        TensorFlowDistributedTrainer,
        Trainer,
    )
    from distributed.training.function_launch import launch
    from distributed.training.own_loop import Session
    from distributed.training.predictions import load_predictions
    from distributed.tuning.tuner import DistributedTuner

__version__ = "0.1.0"
__distributed_trainer__ = True  # tells the console script that this is not Dask's package of the same name

_HOMES = {
    "Callback": "callbacks",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DistributedConfig": "config",
    "DistributedDataParallel": "comm.parallel",
    "DistributedError": "errors",
    "DistributedLauncher": "launcher",
    "DistributedSampler": "comm.parallel",
    "DistributedTuner": "tuning.tuner",
    "EarlyStopping": "callbacks",
    "DeepSpeedTrainer": "trainer",
    "FSDPTrainer": "trainer",
    "History": "runs.history",
    "HorovodTrainer": "trainer",
    "LaunchConfig": "launcher",
    "LearningRateCurve": "finders.curve",
    "Logger": "loggers.logger",
    "PyTorchDDPTrainer": "trainer",
    "RayTrainer": "trainer",
    "ReduceOp": "comm",
    "ResourceError": "errors",
    "Session": "training.own_loop",
    "TensorFlowDistributedTrainer": "trainer",
    "Trainer": "trainer",
    "TrainingError": "errors",
    "TrainingInterrupted": "errors",
    "all_gather": "comm",
    "all_reduce": "comm",
    "barrier": "comm",
    "broadcast": "comm",
    "checkpoint_scope": "gradient_checkpointing",
    "destroy_process_group": "comm",
    "export": "backends.exporting",
    "get_distributed_info": "comm",
    "get_rank": "comm",
    "get_world_size": "comm",
    "init_process_group": "comm",
    "is_initialized": "comm",
    "launch": "training.function_launch",
    "launch_distributed_training": "launcher",
    "load_predictions": "training.predictions",
    "load_weights": "backends.weights",
    "memory_pool_scope": "gradient_checkpointing",
    "no_sync": "comm",
    "over_all": "metrics",
    "reduce_scatter": "comm",
}
__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedTrainer",
    "DistributedConfig",
    "DistributedDataParallel",
    "DistributedError",
    "DistributedLauncher",
    "DistributedSampler",
    "DistributedTuner",
    "EarlyStopping",
    "FSDPTrainer",
    "History",
    "HorovodTrainer",
    "LaunchConfig",
    "LearningRateCurve",
    "Logger",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "ReduceOp",
    "ResourceError",
    "Session",
    "TensorFlowDistributedTrainer",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "checkpoint_scope",
    "destroy_process_group",
    "export",
    "get_distributed_info",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "launch",
    "launch_distributed_training",
    "load_predictions",
    "load_weights",
    "memory_pool_scope",
    "no_sync",
    "over_all",
    "reduce_scatter",
]


def __getattr__(name: str) -> Any:
    if name in ("comm", "gradient_checkpointing"):  # modules whose functions users call by their full names
        return importlib.import_module(f"distributed.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"distributed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
