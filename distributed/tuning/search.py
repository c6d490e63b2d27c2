"""Runs a search and keeps its journal."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from distributed.tuning.plan import SearchPlan
from distributed.tuning.sweep import Sweep

_ENGINE = "distributed.tuning.ray.search"  # whose `search` runs a plan, and `check_here` refuses what cannot be


def engine() -> Any:
    """The module that runs plans."""
    return importlib.import_module(_ENGINE)


def run_search(plan: SearchPlan, sweep: Sweep, show: Callable[[Mapping[str, Any]], object] = lambda line: None) -> None:
    """Run `plan` in this process; each line of the journal is written, then shown. Raises DistributedError."""

    def listen(line: Mapping[str, Any]) -> None:
        note_line(sweep, line)
        show(line)

    engine().search(plan, listen)


def note_line(sweep: Sweep, line: Mapping[str, Any]) -> None:
    """One line into the journal; sweep.json follows where a trial came to its end."""
    detail = {name: value for name, value in line.items() if name not in ("trial", "event")}
    sweep.note(line["trial"], line["event"], **detail)
    if line["event"] == "ended":
        sweep.write()
