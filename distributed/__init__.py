"""One DistributedConfig and one Trainer over several engines. Names are resolved on first use; no framework is loaded here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.callbacks import Callback, EarlyStopping
    from distributed.config import DistributedConfig
    from distributed.errors import (
        CheckpointError,
        ConfigError,
        DistributedError,
        ResourceError,
        TrainingError,
        TrainingInterrupted,
    )
    from distributed.state import History
    from distributed.trainer import FSDPTrainer, PyTorchDDPTrainer, Trainer

__version__ = "0.1.0"
__distributed_trainer__ = True  # how the console script knows this package from Dask's of the same name

_HOMES = {
    "Callback": "callbacks",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DistributedConfig": "config",
    "DistributedError": "errors",
    "EarlyStopping": "callbacks",
    "FSDPTrainer": "trainer",
    "History": "state",
    "PyTorchDDPTrainer": "trainer",
    "ResourceError": "errors",
    "Trainer": "trainer",
    "TrainingError": "errors",
    "TrainingInterrupted": "errors",
}
__all__ = [
    "Callback",
    "CheckpointError",
    "ConfigError",
    "DistributedConfig",
    "DistributedError",
    "EarlyStopping",
    "FSDPTrainer",
    "History",
    "PyTorchDDPTrainer",
    "ResourceError",
    "Trainer",
    "TrainingError",
    "TrainingInterrupted",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"distributed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
