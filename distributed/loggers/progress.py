"""Report to the display how training goes, from the main process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from distributed.callbacks import Callback
from distributed.config.settings import DistributedConfig
from distributed.loggers.base import LoggedFit
from distributed.state import StepResult, TrainState

_BETWEEN_S = 0.25  # seconds between two moves of the bar


def make(fit: LoggedFit) -> list[Callback]:
    """Return the logger that tells the display how training goes, on the main process only."""
    if not fit.context.is_main_process:
        return []
    return [ProgressLogger(fit.report, fit.merged.config, fit.updates_per_epoch, str(fit.run.path))]


class ProgressLogger(Callback):
    """Send `progress`, `log` and `epoch` events to `report`."""

    def __init__(
        self,
        report: Callable[[Mapping[str, Any]], None],
        config: DistributedConfig,
        updates_per_epoch: int | None,
        run: str,
    ) -> None:
        """Create the logger of a fit. `run` names the run directory, because a script may have several."""
        self._report, self._config, self._run = report, config, run
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
        self._report({"kind": "progress", **self._position(state)})

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        if split != "train":
            return
        self._metrics = {name: value for name, value in metrics.items() if name != "samples_per_second"}
        self._rate = metrics.get("samples_per_second")
        if state.step % self._config.log_every_n_steps == 0:  # the end of an epoch has a line of its own
            self._report({"kind": "log", **self._position(state)})

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        self._report({"kind": "epoch", "run": self._run, "row": {**metrics, "epochs": self._config.epochs}})

    def on_train_end(self, state: TrainState) -> None:
        row = state.rows[-1] if state.rows else None
        if row is not None and row["epoch"] > state.epoch and row["step"] == state.step:  # max_steps cut its epoch off
            self.on_epoch_end(state, row)

    def _position(self, state: TrainState) -> dict[str, Any]:
        total = self._total_steps(state)
        done = state.step - self._first_step
        seconds = time.perf_counter() - self._start
        eta = seconds / done * (total - state.step) if total is not None and done > 0 else None
        return {
            "step": state.step, "total_steps": total, "epoch": min(state.epoch + 1, self._config.epochs), "epochs": self._config.epochs,
            "metrics": self._metrics, "samples_per_second": self._rate,
            "elapsed_s": seconds, "eta_s": eta,
        }  # fmt: skip

    def _total_steps(self, state: TrainState) -> int | None:
        limits = [self._config.max_steps]
        if self._per_epoch is not None:
            limits.append(self._per_epoch * self._config.epochs)
        known = [limit for limit in limits if limit is not None]
        return min(known) if known else None
