"""Callback, a user's hooks into the training loop on every rank, and early stopping. What records a run belongs to `loggers`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError
from distributed.metrics.monitor import unknown_metric

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig
    from distributed.state import StepResult, TrainState


@dataclasses.dataclass(frozen=True)
class FitContext:
    """What the hooks of a callback may use, as `self.context`. Made once per fit, on every rank.

    Attributes:
        model: the user's module, without the wrapper of the backend. With `fsdp` and ZeRO-3 each rank holds a part of
            each parameter.
        optimizer: the optimizer that updates it.
        config: the settings of this fit.
        run_dir: the absolute path of the run directory.
        stop: `stop(reason)` ends training on all ranks after the same step. One call on any rank is enough. The run
            then counts as finished, saves a checkpoint at that step and has `reason` as its `stop_reason`. Called in
            `on_train_start`, `on_log` or `on_epoch_end`, it takes effect immediately; in other hooks, with several
            processes, within some tenths of a second. In `on_train_end` it has no effect and logs a warning.
    """

    model: Any
    optimizer: Any
    config: DistributedConfig
    run_dir: Path
    stop: Callable[[str], None]


class Callback:
    """Base class of callbacks. Override the hooks that you need.

    Every hook runs on every rank, with the same metrics. During a fit `self.context` is a `FitContext`: the model, the
    optimizer, the settings, `run_dir` and `stop(reason)`. Do not change `state`.

    `state_dict` and `load_state_dict` make the state of a callback part of the checkpoint (JSON-able values only). The
    main process's state is saved, and on resume every rank gets it.
    """

    __context: FitContext | None = None  # its name does not collide with an attribute of a subclass

    @property
    def context(self) -> FitContext:
        """The objects that a hook may use. Raises ConfigError outside of `fit`."""
        if self.__context is None:
            raise ConfigError(
                f"{type(self).__name__}.context is only available while fit() runs: use it in a hook, such as on_train_start"
            )
        return self.__context

    @context.setter
    def context(self, value: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} sets self.context, through which hooks reach the model and run_dir: give the attribute another name"
        )

    def _bind(self, context: FitContext | None) -> FitContext | None:
        """Set the context, and return the one before."""
        before, self.__context = self.__context, context
        return before

    def on_train_start(self, state: TrainState) -> None:
        """Called before the first step of this attempt."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """Called after each update. `result` holds device scalars: reading one waits for the device."""

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        """Called every `log_every_n_steps` updates (split "train") and after validation (split "val").

        `metrics` are floats, averaged over all ranks.
        """

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        """Called after each `on_log` of split "train".

        `seconds` has the time that each part of an update took (see `TimeSplit.take`).
        """

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Called after each epoch and its validation.

        `metrics` is the row of the epoch: means over training, and validation metrics with the prefix `val_`.
        """

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        """Called after a checkpoint was committed to `path`."""

    def on_train_end(self, state: TrainState) -> None:
        """Called after the last step and its checkpoint. `stop` has no effect here and logs a warning."""

    def on_error(self, state: TrainState, error: BaseException) -> None:
        """Called when training ends with `error`. Other ranks may be gone, so call no collective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in the checkpoint, JSON-able. Called on every rank; the main process's is stored."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class EarlyStopping(Callback):
    """Stop training after `patience` epochs in a row without a better `monitor`.

    Epochs that do not report the monitor are not counted.

    Args:
        monitor: the name of the metric.
        patience: the number of epochs.
        mode: "min" if smaller values are better, else "max".

    Raises ConfigError during `fit` if no epoch has reported the monitor.
    """

    def __init__(self, monitor: str = "val_loss", patience: int = 3, mode: str = "min") -> None:
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best = math.nan
        self.bad_epochs = 0

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            if any(self.monitor in row for row in state.rows):  # not reported in every epoch
                return
            raise unknown_metric("monitor", self.monitor, metrics)
        value = metrics[self.monitor]
        if math.isnan(self.best) or (value < self.best if self.mode == "min" else value > self.best):
            self.best, self.bad_epochs = value, 0
            return
        self.bad_epochs += 1
        if self.bad_epochs >= self.patience:
            self.context.stop("early_stopping")

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if math.isnan(self.best) else self.best, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = math.nan if state["best"] is None else state["best"]
        self.bad_epochs = state["bad_epochs"]


@contextlib.contextmanager
def bound(callbacks: Sequence[Callback], context: FitContext) -> Iterator[None]:
    """Set `context` as the context of `callbacks` inside the `with` block."""
    before = [Callback._bind(callback, context) for callback in callbacks]
    try:
        yield
    finally:
        for callback, earlier in zip(callbacks, before, strict=True):
            Callback._bind(callback, earlier)


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the state of each callback that has one, by the name of its class, for a checkpoint."""
    return {key: kept for key, callback in _keyed(callbacks).items() if (kept := callback.state_dict())}


def load_states(callbacks: Sequence[Callback], kept: Mapping[str, Any]) -> list[str]:
    """Restore each callback's part of `kept`, which `states` returned. A callback without a part keeps its state.

    Returns the names in `kept` that no callback matches.
    """
    keyed = _keyed(callbacks)
    for key, callback in keyed.items():
        if (state := kept.get(key)) is not None:
            callback.load_state_dict(state)
    return [key for key in kept if key not in keyed]


def _keyed(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the name of their class.

    Further ones of a class get a number, independent of other classes.
    """
    keyed: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = 1 + sum(type(other).__name__ == name for other in keyed.values())
        keyed[name if number == 1 else f"{name}:{number}"] = callback
    return keyed
