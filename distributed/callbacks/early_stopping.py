"""End training when a metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.callbacks.base import Callback
from distributed.metrics.monitor import PREFIX, unknown_metric

if TYPE_CHECKING:
    from distributed.state import TrainState


class EarlyStopping(Callback):
    """Stop training after `patience` validations in a row without a better `monitor`.

    A monitor without the prefix `val_` is a metric of training. Epochs are then counted instead of validations. Validations and
    epochs that do not report the monitor are not counted. The validation at the end of training is not counted either, unless it
    was due.

    Args:
        monitor: the name of the metric.
        patience: the number of validations, or of epochs.
        mode: "min" if smaller values are better, else "max".

    Raises:
        ConfigError: during `fit`: the monitor was not reported.
    """

    def __init__(self, monitor: str = "val_loss", patience: int = 3, mode: str = "min") -> None:
        self.monitor, self.patience, self.mode = monitor, patience, mode
        self.best = math.nan
        self.bad_epochs = 0  # validations, or epochs, in a row without a better value

    def on_validation_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if metrics and not state.is_last_row_open and self.monitor.startswith(PREFIX):
            self._judge(state, metrics)

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if not self.monitor.startswith(PREFIX):
            self._judge(state, metrics)

    def _judge(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self.monitor not in metrics:
            if any(self.monitor in row for row in state.rows):  # not reported each time
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
