"""Trials of a sweep on standard output: a live table on a terminal, otherwise one line for each trial that ends."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.errors import shown
from distributed.loggers.wording import duration, number
from distributed.tuning.sweep import Sweep, TrialRecord

_GAP = "  "
_ROOM = 8  # lines of the terminal that are reserved for other output


class TrialTable:
    """Show a sweep on standard output while it runs."""

    def __init__(self, sweep: Sweep, num_samples: int, lines: list[str]) -> None:
        self._sweep, self._num_samples = sweep, num_samples
        self._began = time.monotonic()
        self._live: Any = None
        for line in lines:
            self.print_line(line)
        if sys.stdout.isatty():
            self._open()

    def _open(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Any = Console(highlight=False)
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def print_line(self, line: str) -> None:
        """Print a line that stays above the live table."""
        line = shown(line)
        with contextlib.suppress(OSError):  # the terminal or the pipe was closed: the sweep continues
            if self._live is not None:
                self._console.print(line, markup=False, highlight=False, emoji=False)
            else:
                print(line, flush=True)  # noqa: T201 - the display of a command

    def show(self, line: Mapping[str, Any]) -> None:
        """Show the event of a journal line. The sweep must already contain it."""
        record = self._sweep.records[line["trial"]]
        if line["event"] == "retried":
            self.print_line(f"trial {record.name}  failed and continues: {line['error']}")
        elif line["event"] == "ended" and (self._live is None or record.status == "failed"):
            self.print_line(self.line_of(record))

    def line_of(self, record: TrialRecord) -> str:
        """Return text such as `trial 00003  finished  12 epochs  val_loss 0.041  learning_rate=0.003`."""
        epochs = f"{record.epochs} epoch{'s' * (record.epochs != 1)}"
        parts = [f"trial {record.name}", record.status, epochs, *self._metric(record), in_words(self._config(record))]
        return _GAP.join([*parts, *([record.error] if record.error else [])])

    def _metric(self, record: TrialRecord) -> list[str]:
        row = record.best_row(self._sweep.metric, self._sweep.mode)
        return [] if row is None else [f"{self._sweep.metric} {number(row[self._sweep.metric])}"]

    def _config(self, record: TrialRecord) -> dict[str, Any]:
        return record.best_config(self._sweep.metric, self._sweep.mode)

    def _table(self, caption: bool = True) -> Any:
        """Return a table of all trials, the best first."""
        from rich.table import Table as Rich
        from rich.text import Text

        sweep = self._sweep
        names = list(dict.fromkeys(name for record in sweep.all for name in record.config))
        table = Rich(caption=self._counts() if caption else None, caption_justify="left", box=None, pad_edge=False)
        ordered = sorted(sweep.all, key=lambda record: (sweep.score(record), record.number))
        rows = [self._row(record, names) for record in ordered[: max(3, self._console.height - _ROOM)]]
        heads = ["trial", "status", "epochs", sweep.metric, *names]
        num_shown = _num_fitting([heads, *rows], self._console.width)
        for column, head in enumerate(heads[:num_shown]):
            table.add_column(Text(shown(head)), no_wrap=True, justify="left" if column < 2 else "right")
        if num_shown < len(heads):
            table.add_column("…")
        for row in rows:
            table.add_row(*(Text(shown(cell)) for cell in row[:num_shown]))
        return table

    def _row(self, record: TrialRecord, names: Sequence[str]) -> list[str]:
        row = record.best_row(self._sweep.metric, self._sweep.mode) or {}
        config = self._config(record)
        metric = number(row[self._sweep.metric]) if row else ""
        return [
            record.name,
            record.status,
            str(record.epochs),
            metric,
            *(number(config.get(name, "")) for name in names),
        ]

    def _counts(self) -> str:
        counts: dict[str, int] = {}
        for record in self._sweep.all:
            counts[record.status] = counts.get(record.status, 0) + 1
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        hours = f"{self._sweep.trial_hours:.2g} trial-hours in {duration(time.monotonic() - self._began)}"
        return f"{len(self._sweep.records)} of {self._num_samples} trials: {words or 'none yet'}; {hours}"

    def close(self, best: Path | None) -> None:
        """Stop the live table, then print all trials, the counts and the best trial.

        Args:
            best: path of best.yaml, or None if no trial has a value.
        """
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print(self._table(caption=False))
        self.print_line(self._counts())
        if best is not None and (record := self._sweep.best()) is not None:
            self.print_line(f"best: {self.line_of(record)}")
            self.print_line(f"its settings, for train --config: {best}")


def _num_fitting(rows: Sequence[Sequence[str]], width: int) -> int:
    """Return how many columns fit into `width` characters. The values of a trial are the last columns, so they are
    dropped first; the printed lines show them too."""
    widths = [max(map(len, column)) + len(_GAP) for column in zip(*rows, strict=True)]
    if sum(widths) - len(_GAP) <= width:
        return len(widths)
    return max((num for num in range(4, len(widths)) if sum(widths[:num]) + 1 <= width), default=4)


def in_words(config: Mapping[str, Any]) -> str:
    """Return text such as `learning_rate=0.003 batch_size=32`."""
    return " ".join(f"{name}={number(value)}" for name, value in config.items())
