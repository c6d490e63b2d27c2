"""What a logger is, and what it may know of a fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from distributed.callbacks import Callback
from distributed.checkpoints.agreement import Ranks
from distributed.config.fields import rules
from distributed.config.settings import MONITORING, DistributedConfig

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan, ProcessPlan
    from distributed.loggers.observer import Observer
    from distributed.runs.directory import RunDirectory
    from distributed.state import TrainState, WorkerContext


_PATHS = ("checkpoint_dir", "tensorboard_dir", "resume_from_checkpoint")


class Communicating(Ranks, Protocol):
    """What loggers need of the processes that train together: a part of `distributed.backends.world.World`."""

    def gather(self, value: Any, /) -> list[Any]:
        """Return every rank's `value`, in the order of ranks. A collective."""


class Watched(Protocol):
    """What loggers may ask of an engine. The adapter of a backend provides it."""

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
    state: TrainState  # the state at the start; that of a checkpoint if the fit goes on from one
    updates_per_epoch: int | None
    is_worker: bool  # whether a launcher started this process
    report: Callable[[Mapping[str, Any]], None]  # {"kind": "warning", "text": ...} and the like, to the display


class Logger(Callback):
    """A callback that has something to do after the end of a fit."""

    def close(self) -> None:
        """Called after `result.json` was written, however the fit ended, on the ranks that have the logger.

        Other ranks wait for it.
        """


def is_on_mlflow(merged: MergedConfig) -> bool:
    """Return whether a fit is logged to MLflow: it was asked for, or an experiment or a name for the model is given."""
    config = merged.config
    if merged.is_given("mlflow_tracking"):
        return config.mlflow_tracking
    return config.mlflow_experiment is not None or config.mlflow_register_model is not None


def hyperparameters(fit: LoggedFit) -> dict[str, Any]:
    """Return, by name, the settings given for this run, what a sweep chose, and what makes runs comparable."""
    config, known = fit.merged.config.to_dict(), rules(DistributedConfig)
    names = ("seed", *(name for name in fit.merged.sources if name in known))
    values = {name: config[name] for name in names if name not in _PATHS and known[name].group != MONITORING}
    options = {
        f"{group}.{option}": value
        for group, chosen in values.items()
        if isinstance(chosen, dict)
        for option, value in chosen.items()
    }
    plain = {name: value for name, value in values.items() if not isinstance(value, dict) and value is not None}
    run = {
        "backend": fit.plan.backend, "world_size": fit.context.world_size,
        "global_batch_size": fit.batch.global_batch_size,
    }  # fmt: skip
    return {**plain, **options, **fit.merged.hyperparameters, **run}
