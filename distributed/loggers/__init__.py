"""Where the course of a run is shown and written: the display, files, TensorBoard, MLflow. The page drawn of it belongs to `report`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.callbacks import Callback
from distributed.loggers.base import LoggedFit
from distributed.loggers.registry import LOGGERS, in_use, used_in

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.runs.directory import RunDirectory


def loggers_of(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of this process, in the order in which they hear of things. All ranks call it."""
    return [logger for row in in_use(fit.merged) for logger in row.call("make", fit)]


def check(merged: MergedConfig) -> None:
    """Check the settings and libraries of all loggers.

    Raises ConfigError for settings that do nothing without another one, ResourceError for a library that is missing.
    """
    for row in LOGGERS:
        row.call("check", merged)
    check_libraries(merged)


def check_libraries(merged: MergedConfig) -> None:
    """Check the libraries of the loggers that are on, and the addresses that they log to. Imports nothing heavy.

    Raises ResourceError with the command that installs a missing library, ConfigError for an address that cannot be one.
    """
    for row in in_use(merged):
        row.call("check_library", merged)


def check_directories(merged: MergedConfig) -> None:
    """Create the user's own directories for loggers. Raises ConfigError if one cannot be written."""
    for row in in_use(merged):
        row.call("check_directory", merged)


def environ_of_workers(merged: MergedConfig) -> dict[str, str]:
    """Return the variables by which the workers of a `fit` continue in what is open in this process, such as an MLflow run."""
    environ: dict[str, str] = {}
    for row in in_use(merged):
        environ |= row.call("environ_of_workers", merged) or {}
    return environ


def environ_of_run(run_dir: Path) -> dict[str, str]:
    """Return the same variables for the workers of a further attempt at the run of `run_dir`."""
    environ: dict[str, str] = {}
    for row in used_in(run_dir):
        environ |= row.call("environ_of_run", run_dir) or {}
    return environ


def end_elsewhere(run: RunDirectory, code: int) -> None:
    """Tell the loggers of a run that it ended with the exit code `code`, if it failed: no worker may be left to do so. Launcher only."""
    for row in used_in(run.path) if code else ():
        row.call("end", run, code)


def mlflow_run_id(run_dir: str | os.PathLike[str]) -> str | None:
    """Return the id of the MLflow run that the run at `run_dir` is logged to.

    Return None if it is not logged to MLflow, or MLflow has not answered yet.
    """
    from distributed.loggers._mlflow.spool import Record

    record = Record.read(Path(run_dir))
    return None if record is None else record.run_id
