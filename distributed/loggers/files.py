"""Write metrics.jsonl and times.jsonl on the main process: one object per logged event."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from distributed.callbacks import Callback
from distributed.loggers.base import LoggedFit
from distributed.state import TrainState

logger = logging.getLogger(__name__)


def make(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of both files, on the main process only."""
    return [MetricsFile(fit.run.metrics), TimesFile(fit.run.times)] if fit.context.is_main_process else []


class JsonLines(Callback):
    """Append rows to `path`.

    What a killed attempt wrote after the checkpoint from which training goes on is removed first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._is_losing = False

    def on_train_start(self, state: TrainState) -> None:
        if self._path.exists():
            self._forget_after(state)

    def on_train_end(self, state: TrainState) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self.on_train_end(state)

    def _forget_after(self, state: TrainState) -> None:
        """Cut off all rows after the last one that stays, in place, because that works on a full disk too."""
        end = kept = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            end += len(line)
            if line.endswith(b"\n") and _is_before(line, state):
                kept = end
        if kept < end:
            os.truncate(self._path, kept)

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk costs rows, not the run
            if not self._is_losing:
                logger.warning(
                    "%s cannot be written (%s): rows are lost until it can be written", self._path, error.strerror
                )
            self._is_losing = True


class MetricsFile(JsonLines):
    """RUN/metrics.jsonl: loss, metrics, learning rate, throughput."""

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        row = {"step": state.step, "epoch": state.epoch, "time": time.time(), "split": split}
        self._write(row | {name: value if math.isfinite(value) else None for name, value in metrics.items()})


class TimesFile(JsonLines):
    """RUN/times.jsonl: where the time of an update went, in seconds."""

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        row = {"step": state.step, "epoch": state.epoch, "time": time.time()}
        self._write(row | {name: round(value, 9) for name, value in seconds.items()})


def _is_before(line: bytes, state: TrainState) -> bool:
    """Return whether the row will not be written again.

    A row of this step's validation will be, while its epoch is unfinished. A row of this step's training will be,
    while sums of it wait for their log line.
    """
    try:
        row = json.loads(line)
        step, epoch, split = row["step"], row["epoch"], row.get("split")
    except (ValueError, KeyError, TypeError):  # half a line of a killed writer
        return False
    if step != state.step:
        return bool(step < state.step)
    return bool(epoch < state.epoch) if split == "val" else not state.log_sums
