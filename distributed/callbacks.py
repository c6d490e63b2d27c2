"""Callback: watches the loop on every rank, with reduced metrics. Early stopping is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState


class Callback:
    """Override what you need; every hook runs on every rank. `state` is to be read.

    `state_dict` and `load_state_dict` make a callback part of the checkpoint (JSON-able values only).
    """

    def on_train_start(self, state: TrainState) -> None:
        """Before the first step of this attempt."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """After each update. `result` holds device scalars: reading one costs a sync."""

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        """Every `log_every_n_steps` updates (split "train") and after validation ("val"), with floats meaned over all ranks."""

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """After validation, with the row of the epoch: training means, and validation under `val_`."""

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        """After a checkpoint was committed."""

    def on_train_end(self, state: TrainState) -> None:
        """After the last step and its checkpoint."""

    def on_error(self, state: TrainState, error: BaseException) -> None:
        """When training ends with `error`. Other ranks may be gone: call no collective."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""


class EarlyStopping(Callback):
    """Ends training after `patience` epochs without a better `monitor`."""

    def __init__(self, monitor: str = "val_loss", patience: int = 3, mode: str = "min") -> None:
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best = math.nan
        self.bad_epochs = 0

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            raise unknown_metric("monitor", self.monitor, metrics)
        value = metrics[self.monitor]
        if math.isnan(self.best) or (value < self.best if self.mode == "min" else value > self.best):
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs >= self.patience:
            state.stop_reason = "early_stopping"

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if math.isnan(self.best) else self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = math.nan if state["best"] is None else state["best"]
        self.bad_epochs = state["bad_epochs"]


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What the callbacks want to find again, by their place and class; for a checkpoint."""
    return {_key(i, callback): kept for i, callback in enumerate(callbacks) if (kept := callback.state_dict())}


def load_states(callbacks: Sequence[Callback], kept: Mapping[str, Any]) -> None:
    """Give each callback what it had in `states`; one that was not there then gets nothing."""
    for index, callback in enumerate(callbacks):
        if (state := kept.get(_key(index, callback))) is not None:
            callback.load_state_dict(state)


def _key(index: int, callback: Callback) -> str:
    return f"{index}:{type(callback).__name__}"


def unknown_metric(field: str, name: str, metrics: Mapping[str, float]) -> ConfigError:
    """The error for a metric that nobody reports, with those that are reported."""
    reported = ", ".join(key for key in metrics if key not in ("epoch", "step"))
    return ConfigError(f"{field}={name!r} is not reported: choose one of {reported}")
