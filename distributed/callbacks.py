"""Callback, by which users hook into the loop on every rank, and early stopping. What writes the course of a run belongs to `loggers`."""

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
        model: the user's own module, without the backend's wrapper. `fsdp` and ZeRO 3 leave a part of each parameter on a rank.
        optimizer: the optimizer that updates it.
        config: the settings of this fit.
        run_dir: absolute path of the run directory.
        stop: `stop(reason)` ends training. One call on any rank, in any hook but `on_train_end`, ends it on all ranks after the same
            step; the run counts as finished, saves a checkpoint at that step, and shows `reason` as its `stop_reason`. Asked for in
            `on_train_start`, `on_log` or `on_epoch_end` it holds at once, in other hooks of a run of several processes within some
            tenths of a second. In `on_train_end` training has ended: a stop has no effect there, and a warning says so.
    """

    model: Any
    optimizer: Any
    config: DistributedConfig
    run_dir: Path
    stop: Callable[[str], None]


class Callback:
    """Override what you need; every hook runs on every rank. `state` is to be read.

    During a fit `self.context` is a FitContext: the model, the optimizer, the settings, `run_dir`, and `stop(reason)`.

    `state_dict` and `load_state_dict` make a callback part of the checkpoint (JSON-able values only). The main process'
    state is the one that is kept and given to every rank: the metrics that hooks see are the same everywhere.
    """

    _context: FitContext | None = None

    @property
    def context(self) -> FitContext:
        """What a hook may use. ConfigError outside of a fit."""
        if self._context is None:
            raise ConfigError(
                f"{type(self).__name__}.context is known while fit() runs: use it in a hook, such as on_train_start"
            )
        return self._context

    def on_train_start(self, state: TrainState) -> None:
        """Before the first step of this attempt."""

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """After each update. `result` holds device scalars: reading one costs a sync."""

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        """Every `log_every_n_steps` updates (split "train") and after validation ("val"), with floats meaned over all ranks."""

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        """After each `on_log` of "train": where the time of an update went, as `TimeSplit.take` gives it."""

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """After validation, with the row of the epoch: training means, and validation under `val_`."""

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        """After a checkpoint was committed."""

    def on_train_end(self, state: TrainState) -> None:
        """After the last step and its checkpoint. `stop` has no effect any more, and a warning says so."""

    def on_error(self, state: TrainState, error: BaseException) -> None:
        """When training ends with `error`. Other ranks may be gone: call no collective."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""


class EarlyStopping(Callback):
    """End training after `patience` epochs without a better `monitor`. An epoch that does not report it is not counted."""

    def __init__(self, monitor: str = "val_loss", patience: int = 3, mode: str = "min") -> None:
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best = math.nan
        self.bad_epochs = 0

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            if any(self.monitor in row for row in state.rows):  # reported now and then
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
    """Within it `context` is that of `callbacks`."""
    before = [callback._context for callback in callbacks]
    for callback in callbacks:
        callback._context = context
    try:
        yield
    finally:
        for callback, earlier in zip(callbacks, before, strict=True):
            callback._context = earlier


def states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What the callbacks want to find again, by the name of their class; for a checkpoint."""
    return {key: kept for key, callback in _keyed(callbacks).items() if (kept := callback.state_dict())}


def load_states(callbacks: Sequence[Callback], kept: Mapping[str, Any]) -> list[str]:
    """Give each callback what it had in `states`; one that was not there then gets nothing. Returns what nobody took."""
    keyed = _keyed(callbacks)
    for key, callback in keyed.items():
        if (state := kept.get(key)) is not None:
            callback.load_state_dict(state)
    return [key for key in kept if key not in keyed]


def _keyed(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Each under the name of its class, from the second of a class on with a number: others may come and go."""
    keyed: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = 1 + sum(type(other).__name__ == name for other in keyed.values())
        keyed[name if number == 1 else f"{name}:{number}"] = callback
    return keyed
