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
    return [*_of_files(fit), *_of_tensorboard(fit), *_of_profiler(fit), *_of_display(fit)]


def check(merged: MergedConfig) -> None:
    """ConfigError for settings that do nothing without another one, ResourceError for a library that is missing."""
    from distributed import profiling
    from distributed.loggers import tensorboard

    tensorboard.check(merged)
    profiling.check(merged)
    check_libraries(merged)


def check_libraries(merged: MergedConfig) -> None:
    """ResourceError with the way out where a library of a logger is missing. Imports nothing heavy."""
    from distributed.loggers import tensorboard

    tensorboard.check_library(merged)


def check_directories(merged: MergedConfig) -> None:
    """ConfigError where a directory of the user's for a logger cannot be written. Creates it."""
    from distributed.loggers import tensorboard

    tensorboard.check_directory(merged)


def _of_files(fit: LoggedFit) -> list[Callback]:
    from distributed.loggers.files import MetricsFile, TimesFile

    return [MetricsFile(fit.run.metrics), TimesFile(fit.run.times)] if fit.context.is_main_process else []


def _of_display(fit: LoggedFit) -> list[Callback]:
    from distributed.loggers.progress import ProgressLogger

    progress = ProgressLogger(fit.report, fit.merged.config, fit.updates_per_epoch, str(fit.run.path))
    return [progress] if fit.context.is_main_process else []


def _of_tensorboard(fit: LoggedFit) -> list[Callback]:
    """Histograms are made on all ranks."""
    from distributed.loggers.tensorboard import TensorBoard, is_on

    if not is_on(fit.merged):
        return []
    writer = TensorBoard(fit) if fit.context.is_main_process else None
    made: list[Callback] = [] if writer is None else [writer]
    if fit.merged.config.tensorboard_histograms:
        from distributed.loggers.histograms import Histograms

        made.append(Histograms(fit, writer))
    return made


def _of_profiler(fit: LoggedFit) -> list[Callback]:
    """On all ranks, each of which writes its trace."""
    if not fit.merged.config.profile:
        return []
    from distributed.profiling import Profiling

    return [Profiling(fit)]
