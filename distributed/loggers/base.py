"""What a logger is, and what it may know of a fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from distributed.callbacks import Callback
from distributed.checkpoints.agreement import Ranks

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan, ProcessPlan
    from distributed.loggers.observer import Observer
    from distributed.runs.directory import RunDirectory
    from distributed.state import TrainState, WorkerContext


class Communicating(Ranks, Protocol):
    """What loggers need of the processes that train together: a part of `distributed.backends.world.World`."""

    def gather(self, value: Any, /) -> list[Any]:
        """Return every rank's `value`, in the order of ranks. A collective."""


class Watched(Protocol):
    """What loggers may ask of an engine: the adapter of a backend."""

    model: Any  # the user's module
    devices_per_process: int

    @property
    def world(self) -> Communicating:
        """The processes that train together."""

    @property
    def observer(self) -> Observer:
        """What can be observed of training."""


@dataclasses.dataclass(frozen=True)
class LoggedFit:
    """What a logger may know of a fit before its first step."""

    run: RunDirectory
    merged: MergedConfig
    plan: ProcessPlan
    batch: BatchPlan
    context: WorkerContext
    backend: Watched
    state: TrainState  # where it starts: of a checkpoint, where there is one to go on from
    updates_per_epoch: int | None
    is_worker: bool  # whether a launcher started this process
    report: Callable[[Mapping[str, Any]], None]  # {"kind": "warning", "text": ...} and the like, to the display


class Logger(Callback):
    """One that has something to do after the end of a fit."""

    def close(self) -> None:
        """After `result.json` was written, however the fit ended. On the ranks that have it; others wait, as long as it takes."""


def is_on_mlflow(merged: MergedConfig) -> bool:
    """Whether a fit is logged to MLflow: asked for, or an experiment or a name for the model is given."""
    config = merged.config
    if merged.is_typed("mlflow_tracking"):
        return config.mlflow_tracking
    return config.mlflow_experiment is not None or config.mlflow_register_model is not None
