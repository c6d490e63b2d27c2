"""Run a sweep plan with its engine, and write the journal of the sweep."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from distributed.tuning.plan import SweepPlan
from distributed.tuning.sweep import Sweep

_ENGINE = "distributed.tuning.ray.sweep"  # the rest of `tuning` uses only the names in `__all__` of this module


def engine() -> Any:
    """Return the module that runs sweep plans."""
    return importlib.import_module(_ENGINE)


def run_sweep(plan: SweepPlan, sweep: Sweep, show: Callable[[Mapping[str, Any]], object] = lambda line: None) -> None:
    """Run `plan` in this process. Each line of the journal is written first, then passed to `show`. Raises DistributedError
    if the sweep cannot run, or if every trial failed."""

    def listen(line: Mapping[str, Any]) -> None:
        record_line(sweep, line)
        show(line)

    engine().run_sweep(plan, listen)


def record_line(sweep: Sweep, line: Mapping[str, Any]) -> None:
    """Append one line to the journal. Rewrite sweep.json if the line ends a trial."""
    detail = {name: value for name, value in line.items() if name not in ("trial", "event")}
    sweep.record_event(line["trial"], line["event"], **detail)
    if line["event"] == "ended":
        sweep.write()
