"""Progress of a sweep in the output of a notebook cell, updated in place."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from typing import Any

from distributed.loggers.notebook import CellOutput
from distributed.loggers.wording import number
from distributed.tuning.sweep import OPEN, Sweep


class CellProgress:
    """Progress bar of the ended trials, with the best trial so far. Its methods must be called in the thread that
    runs the cell."""

    def __init__(self, sweep: Sweep, num_samples: int) -> None:
        self._sweep, self._num_samples = sweep, num_samples
        self._output = CellOutput()

    def start(self) -> None:
        """Show the bar before the first trial exists. A cluster takes seconds to start."""
        self._show()

    def hear(self, line: Mapping[str, Any]) -> None:
        """Update the bar after `line` was written to the journal."""
        if line["event"] != "row":
            self._show()

    def close(self, status: str) -> None:
        """Show the final state. The bar stays in the notebook whatever the status is."""
        self._show()

    def _show(self) -> None:
        text = html.escape(self._text())
        bar = f'<progress value="{self._num_ended}" max="{self._num_samples}"></progress>'
        self._output.put({"text/plain": self._text(), "text/html": f"<div>{bar} &nbsp; {text}</div>"})

    @property
    def _num_ended(self) -> int:
        return sum(record.status not in (*OPEN, "interrupted") for record in self._sweep.all)

    def _text(self) -> str:
        """Return text such as `6 of 6 trials: 2 finished, 4 stopped; best val_loss 0.1089 (trial 00005)`."""
        sweep, counts = self._sweep, Counter(record.status for record in self._sweep.all)
        text = f"{self._num_ended} of {self._num_samples} trials: "
        text += ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "starting"
        best = sweep.best()
        row = None if best is None else best.best_row(sweep.metric, sweep.mode)
        if best is not None and row is not None:
            text += f"; best {sweep.metric} {number(row[sweep.metric])} (trial {best.name})"
        return text
