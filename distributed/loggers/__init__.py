"""Where the course of a run is shown and written: the display, files, TensorBoard, MLflow. The page drawn of it belongs to `report`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.callbacks import Callback
from distributed.errors import DistributedError
from distributed.loggers.base import LoggedFit, is_on_mlflow

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.runs.directory import RunDirectory


def environ_of_workers(merged: MergedConfig) -> dict[str, str]:
    """What the workers of a `fit` outside of a worker need for their loggers to go on with what is open in this process."""
    if not is_on_mlflow(merged):
        return {}
    from distributed.loggers._mlflow.place import environ_of_open_run

    return environ_of_open_run()


def environ_of_run(run_dir: Path) -> dict[str, str]:
    """The same for the workers of a further attempt at the run of `run_dir`."""
    if not (run_dir / "mlflow.json").exists():
        return {}
    from distributed.loggers.mlflow import recorded_environ

    return recorded_environ(run_dir)


def mlflow_run_id(run_dir: str | os.PathLike[str]) -> str | None:
    """The id of the MLflow run that the run at `run_dir` is logged to; None where it is not, or MLflow has not answered yet."""
    from distributed.loggers._mlflow.spool import Record

    record = Record.read(Path(run_dir))
    return None if record is None else record.run_id


def end_elsewhere(run: RunDirectory, code: int) -> None:
    """Tell loggers elsewhere that a run has ended with the exit code `code` and no worker is left to say so. Launcher only."""
    if code == 0 or not (run.path / "mlflow.json").exists():
        return
    from distributed.loggers.mlflow import end_run

    with contextlib.suppress(OSError, DistributedError):  # the run has a cause of its own to tell
        end_run(run, "KILLED" if code in (130, 143) else "FAILED")


def loggers_of(fit: LoggedFit) -> list[Callback]:
    """The loggers of this process, in the order in which they hear of things. All ranks call it."""
    return [*_of_files(fit), *_of_tensorboard(fit), *_of_profiler(fit), *_of_display(fit), *_of_mlflow(fit)]


def check(merged: MergedConfig) -> None:
    """ConfigError for settings that do nothing without another one, ResourceError for a library that is missing."""
    from distributed.loggers import profiling, tensorboard

    tensorboard.check(merged)
    profiling.check(merged)
    check_libraries(merged)


def check_libraries(merged: MergedConfig) -> None:
    """ResourceError with the way out where a library of a logger is missing, ConfigError for an address that none can be.
    Imports nothing heavy."""
    from distributed.loggers import tensorboard

    tensorboard.check_library(merged)
    if is_on_mlflow(merged):
        from distributed.loggers._mlflow.place import check

        check(merged.config)


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
    from distributed.loggers.profiling import Profiling

    return [Profiling(fit)]


def _of_mlflow(fit: LoggedFit) -> list[Callback]:
    """On all ranks, which join the run of the main process."""
    if not is_on_mlflow(fit.merged):
        return []
    from distributed.loggers.mlflow import mlflow_loggers

    return mlflow_loggers(fit)
