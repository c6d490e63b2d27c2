"""Report the progress of training to the display, from the main process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distributed.callbacks import Callback
from distributed.config.settings import DistributedConfig
from distributed.config.training_arguments import UNLIMITED
from distributed.loggers.base import LoggedFit
from distributed.loggers.wording import epoch_line
from distributed.state import OnEvent, StepResult, TrainState

_BETWEEN_S = 0.25  # seconds between two moves of the bar


def make(fit: LoggedFit) -> list[Callback]:
    """Return the logger that reports the progress of training to the display, on the main process only."""
    if not fit.context.is_main_process:
        return []
    return [ProgressLogger(fit.on_event, fit.merged.config, fit.updates_per_epoch, str(fit.run.path))]


class ProgressLogger(Callback):
    """Send `progress`, `log` and `row` events to `on_event`."""

    def __init__(
        self,
        on_event: OnEvent,
        config: DistributedConfig,
        updates_per_epoch: int | None,
        run: str,
    ) -> None:
        """Create the logger of a fit. `run` names the run directory, because a script may have several."""
        self._on_event, self._config, self._run = on_event, config, run
        self._per_epoch = updates_per_epoch
        self._next = 0.0
        self._start = time.perf_counter()
        self._first_step = 0
        self._metrics: dict[str, float] = {}
        self._rate: float | None = None  # samples per second at the last log line

    def on_train_start(self, state: TrainState) -> None:
        self._start, self._first_step = time.perf_counter(), state.step

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        now = time.perf_counter()
        if now < self._next:
            return
        self._next = now + _BETWEEN_S
        self._on_event({"kind": "progress", **self._position(state)})

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        if split != "train":
            return
        self._metrics = {name: value for name, value in metrics.items() if name != "samples_per_second"}
        self._rate = metrics.get("samples_per_second")
        if state.step % self._config.log_every_n_steps == 0:  # not at the end of an epoch, which has its own line
            self._on_event({"kind": "log", **self._position(state)})

    def on_validation_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if metrics and (self._config.validates_by_steps or not state.step):
            self._send_row({**metrics, "validations": sum(row["step"] > 0 for row in state.rows)})

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self._config.validates_by_steps:  # the rows are those of validations
            self._on_event({"kind": "notice", "text": epoch_line({**metrics, "epochs": self._epochs})})
        else:
            self._send_row(metrics)

    def on_train_end(self, state: TrainState) -> None:
        # If max_steps ended training in the middle of an epoch, this row was not reported yet.
        if state.is_last_row_open and not self._config.validates_by_steps and state.rows[-1]["step"] == state.step:
            self._send_row(state.rows[-1])

    def _send_row(self, row: Mapping[str, float]) -> None:
        self._on_event({"kind": "row", "run": self._run, "row": {**row, "epochs": self._epochs}})

    def _position(self, state: TrainState) -> dict[str, Any]:
        total = self._total_steps(state)
        done = state.step - self._first_step
        seconds = time.perf_counter() - self._start
        eta = seconds / done * (total - state.step) if total is not None and done > 0 else None
        return {
            "step": state.step, "total_steps": total, "epoch": min(state.epoch + 1, self._config.epochs), "epochs": self._epochs,
            "metrics": self._metrics, "samples_per_second": self._rate,
            "elapsed_s": seconds, "eta_s": eta,
        }  # fmt: skip

    @property
    def _epochs(self) -> int | None:
        """The number of epochs, or None if only `max_steps` ends training."""
        return self._config.epochs if self._config.epochs < UNLIMITED else None

    def _total_steps(self, state: TrainState) -> int | None:
        limits = [self._config.max_steps]
        if self._per_epoch is not None:
            limits.append(self._per_epoch * self._config.epochs)
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None
