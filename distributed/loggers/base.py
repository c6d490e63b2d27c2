"""Base classes of loggers, and the facts about a fit that a logger gets."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distributed.callbacks import Callback
from distributed.checkpoints.agreement import Ranks
from distributed.config.fields import rules
from distributed.config.settings import MONITORING, DistributedConfig
from distributed.metrics.monitor import PREFIX

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan, ProcessPlan
    from distributed.loggers.logger import Logger
    from distributed.loggers.observer import Observer
    from distributed.runs.directory import RunDirectory
    from distributed.state import LoggedMedia, OnEvent, TrainState, WorkerContext


_PATHS = ("checkpoint_dir", "tensorboard_dir", "resume_from_checkpoint", "init_from")


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
    """Facts about a fit that a logger gets before the first step."""

    run: RunDirectory
    merged: MergedConfig
    plan: ProcessPlan
    batch: BatchPlan
    context: WorkerContext
    backend: Watched
    state: TrainState  # the state at the start, which is that of a checkpoint if the fit resumes from one
    updates_per_epoch: int | None
    is_worker: bool  # whether a launcher started this process
    loggers: Sequence[Logger]  # those that the user passed as objects
    callbacks: Sequence[Callback]  # those of the user
    # Function that sends an event such as {"kind": "warning", "text": ...} to the display.
    on_event: OnEvent


class Recorder(Callback):
    """A callback that also gets what the user's hooks log. The main process calls it."""

    def record_values(self, state: TrainState, values: Mapping[str, float]) -> None:
        """Record values that hooks logged at `state.step` outside of a step, reduced over all ranks."""

    def record_media(self, state: TrainState, media: LoggedMedia) -> None:
        """Record an image, a text or the like, whose file is in the run directory."""


class Tracker(Recorder):
    """A recorder that is also called after the end of a fit."""

    def close(self) -> None:
        """Close the logger. Called after `result.json` was written, however the fit ended.

        Only the ranks that have the logger call it. The other ranks wait for them.
        """


class ValueTracker(Tracker, abc.ABC):
    """A tracker that takes all values of a step under the names of `History`."""

    @abc.abstractmethod
    def _metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of `step`."""

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        prefix = PREFIX if split == "val" else ""
        self._metrics(
            state.step, {f"{prefix}{name}": value for name, value in metrics.items()} | {"epoch": state.epoch}
        )

    def record_values(self, state: TrainState, values: Mapping[str, float]) -> None:
        self._metrics(state.step, values)


def is_on_mlflow(merged: MergedConfig) -> bool:
    """Return whether a fit is logged to MLflow: the logger is given, or an experiment or a name for the model is given."""
    config = merged.config
    if "mlflow" in config.logger_names:
        return True
    if merged.is_given("mlflow_tracking"):
        return config.mlflow_tracking
    return config.mlflow_experiment is not None or config.mlflow_register_model is not None


def hyperparameters(fit: LoggedFit) -> dict[str, Any]:
    """Return by name the settings given for this run, the hyperparameters of a sweep, and values by which runs are compared."""
    config, known = fit.merged.config.to_dict(), rules(DistributedConfig)
    names = ("seed", *(name for name in fit.merged.sources if name in known))
    values = {name: config[name] for name in names if name not in _PATHS and known[name].section != MONITORING}
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
