"""Where the course of a run is shown and written. A logger is a callback of the main process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.callbacks import Callback

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.plan import BatchPlan, ProcessPlan
    from distributed.run_dir import RunDirectory
    from distributed.settings import MergedConfig
    from distributed.state import TrainState, WorkerContext


@dataclasses.dataclass(frozen=True)
class LoggedFit:
    """What a logger may know of a fit before its first step."""

    run: RunDirectory
    merged: MergedConfig
    plan: ProcessPlan
    batch: BatchPlan
    context: WorkerContext
    backend: Backend[Any]
    state: TrainState  # where it starts: of a checkpoint, where there is one to go on from
    updates_per_epoch: int | None
    report: Callable[[Mapping[str, Any]], None]  # {"kind": "warning", "text": ...} and the like, to the display


def loggers_of(fit: LoggedFit) -> list[Callback]:
    """The loggers of this process, in the order in which they hear of things. All ranks call it."""
    if not fit.context.is_main_process:
        return []
    from distributed.loggers.files import MetricsFile, TimesFile
    from distributed.loggers.progress import ProgressLogger

    progress = ProgressLogger(fit.report, fit.merged.config, fit.updates_per_epoch, str(fit.run.path))
    return [MetricsFile(fit.run.metrics), TimesFile(fit.run.times), progress]
