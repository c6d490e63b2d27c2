"""Write metrics.jsonl, times.jsonl and media.jsonl on the main process: one object per logged event."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from distributed.callbacks import Callback
from distributed.loggers.base import LoggedFit, Recorder
from distributed.state import LoggedMedia, TrainState

logger = logging.getLogger(__name__)


def make(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of the files, on the main process only."""
    if not fit.context.is_main_process:
        return []
    return [MetricsFile(fit.run.metrics), TimesFile(fit.run.times), MediaFiles(fit.run.media)]


class JsonLines(Recorder):
    """Append rows to `path`.

    When training resumes from a checkpoint, rows that an earlier attempt wrote after this checkpoint are removed first.
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
        """Truncate the file after the last row to keep, in place, because that works on a full disk too."""
        end = kept = 0
        for line in self._path.read_bytes().splitlines(keepends=True):
            end += len(line)
            if line.endswith(b"\n") and self._is_before(line, state):
                kept = end
        if kept < end:
            os.truncate(self._path, kept)

    def _is_before(self, line: bytes, state: TrainState) -> bool:
        return _is_before(line, state)

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8", buffering=1)
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:  # with a full disk, rows are lost, but the run goes on
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
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

    def record_values(self, state: TrainState, values: Mapping[str, float]) -> None:
        self.on_log(state, "logged", values)


class TimesFile(JsonLines):
    """RUN/times.jsonl: where the time of an update went, in seconds."""

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        row = {"step": state.step, "epoch": state.epoch, "time": time.time()}
        self._write(row | {name: round(value, 9) for name, value in seconds.items()})


class MediaFiles(JsonLines):
    """RUN/media: images, texts and the like; RUN/media.jsonl: one row for each of them."""

    def record_media(self, state: TrainState, media: LoggedMedia) -> None:
        path = self._path.parent / media.path
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(media.content)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # a part of it
            self._warn_once(error)
            return
        row = {"step": media.step, "epoch": state.epoch, "time": time.time(), "name": media.name, "kind": media.kind}
        self._write(row | ({} if media.rank is None else {"rank": media.rank}) | {"path": media.path})

    def _is_before(self, line: bytes, state: TrainState) -> bool:
        """Return whether the row is not newer than `state`, because all media of a step are recorded before its checkpoint."""
        try:
            return bool(json.loads(line)["step"] <= state.step)
        except (ValueError, KeyError, TypeError):  # an incomplete line
            return False


def media_at(path: Path, step: int) -> dict[tuple[str, int], int]:
    """Return (full name, step) -> number of media, of those of `step` in the file media.jsonl."""
    found: Counter[tuple[str, int]] = Counter()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # an incomplete line
            row = json.loads(line)
            if row["step"] == step:
                found[row["name"] if "rank" not in row else f"{row['name']}/rank_{row['rank']}", step] += 1
    return dict(found)


def _is_before(line: bytes, state: TrainState) -> bool:
    """Return whether the row was written before `state`, so that it will not be written again.

    A row of a validation at this very step will be written again if the state has no row of the step. A row of training at this
    step will be written again if the state still has sums for the next log line. Values that hooks have logged belong to either of
    them.
    """
    try:
        row = json.loads(line)
        step, split = row["step"], row.get("split")
    except (ValueError, KeyError, TypeError):  # an incomplete line that a killed writer left
        return False
    if step != state.step:
        return bool(step < state.step)
    is_trained = not state.log_sums
    return {"val": state.has_row, "logged": state.has_row or is_trained}.get(split, is_trained)
