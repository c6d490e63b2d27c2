"""Write metrics.csv on the main process: the rows of metrics.jsonl as one table."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed.callbacks import Callback
from distributed.checkpoints.durable import replace_text
from distributed.loggers.base import LoggedFit, Recorder
from distributed.metrics.monitor import PREFIX
from distributed.state import TrainState

logger = logging.getLogger(__name__)

_POSITION = ("step", "epoch", "time")


def make(fit: LoggedFit) -> list[Callback]:
    """Return the writer, on the main process only."""
    return [CsvFile(fit.run.metrics)] if fit.context.is_main_process else []


class CsvFile(Recorder):
    """RUN/metrics.csv, a copy of metrics.jsonl, whose logger comes before this one.

    New rows are appended. The whole file is rewritten when training begins and when rows have a new column. So it always has
    one header, and after a resume it has the rows of metrics.jsonl.
    """

    def __init__(self, source: Path) -> None:
        self._source, self._path = source, source.with_suffix(".csv")
        self._columns: dict[str, None] = {}
        self._copied = 0  # bytes of metrics.jsonl
        self._is_losing = False

    def on_train_start(self, state: TrainState) -> None:
        self._columns, self._copied = dict.fromkeys(_POSITION), 0
        self._copy()

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        self._copy()

    def record_values(self, state: TrainState, values: Mapping[str, float]) -> None:
        self._copy()

    def _copy(self) -> None:
        """Copy the rows of metrics.jsonl that the table lacks."""
        try:
            rows, end = _read(self._source, self._copied)
            if self._copied and all(row.keys() <= self._columns.keys() for row in rows):
                with self._path.open("a", encoding="utf-8", newline="") as file:
                    file.write(self._text(rows))
            else:
                rows, end = _read(self._source, 0)
                self._columns |= dict.fromkeys(name for row in rows for name in row)
                replace_text(self._path, self._text([{name: name for name in self._columns}, *rows]))
            self._copied = end
        except OSError as error:  # with a full disk, the next row tries again
            self._copied = 0
            if not self._is_losing:
                logger.warning("%s cannot be written (%s)", self._path, error.strerror)
            self._is_losing = True

    def _text(self, rows: Iterable[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, list(self._columns), lineterminator="\n").writerows(rows)
        return text.getvalue()


def _read(source: Path, begin: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows from byte `begin` on, and the byte at which they end. Metrics of validation get their prefix."""
    content = source.read_bytes()[begin:] if source.exists() else b""
    content = content[: content.rfind(b"\n") + 1]  # without a line that is not complete
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a full disk has cut it
            continue
        prefix = PREFIX if row.pop("split") == "val" else ""
        rows.append({name if name in _POSITION else f"{prefix}{name}": value for name, value in row.items()})
    return rows, begin + len(content)
