"""The registry of loggers: one row each. A new logger is one file plus one row here.

A function of a row is named as "module:function" and imported when it is called, so that a logger that is off costs nothing.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.callbacks import Callback
    from distributed.config.merging import MergedConfig
    from distributed.loggers.base import LoggedFit
    from distributed.runs.directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class LoggerRow:
    """What the rest of the package may know of a logger without importing it.

    Each field but `name` and `record` names a function; "" stands for one that does nothing.

    Attributes:
        name: the name of the logger.
        make: `(LoggedFit) -> list[Callback]`, the loggers of this process. All ranks call it.
        is_on: `(MergedConfig) -> bool`; "" for a logger that is always on. The fields marked * are called only if it is on.
        check: `(MergedConfig) -> None`, raises ConfigError for settings that are wrong or have no effect.
        check_library: * `(MergedConfig) -> None`, raises ResourceError if a library is missing. Imports nothing heavy.
        check_directory: * `(MergedConfig) -> None`, raises ConfigError if a directory of the user's cannot be written.
        environ_of_workers: * `(MergedConfig) -> dict`, the variables by which the workers of a `fit` continue in what is open in this
            process.
        record: the file in the run directory that shows that the logger was used. The two functions below are called only if it
            exists.
        environ_of_run: `(run directory) -> dict`, the variables for the workers of a further attempt.
        end: `(RunDirectory, exit code) -> None`, called by the launcher after a failure, when no worker may be left to end the log.
    """

    name: str
    make: str
    is_on: str = ""
    check: str = ""
    check_library: str = ""
    check_directory: str = ""
    environ_of_workers: str = ""
    record: str = ""
    environ_of_run: str = ""
    end: str = ""

    def call(self, function: str, *arguments: Any) -> Any:
        """Call one of the functions above by its field's name. Return None if this logger has none."""
        name = getattr(self, function)
        return pkgutil.resolve_name(name)(*arguments) if name else None

    def is_in_use(self, merged: MergedConfig) -> bool:
        """Return whether the settings switch this logger on."""
        return not self.is_on or bool(self.call("is_on", merged))


# In the order in which their hooks are called.
LOGGERS: list[LoggerRow] = [
    LoggerRow("files", "distributed.loggers.files:make"),
    LoggerRow(
        "tensorboard", "distributed.loggers.tensorboard:make", "distributed.loggers.tensorboard:is_on",
        check="distributed.loggers.tensorboard:check", check_library="distributed.loggers.tensorboard:check_library",
        check_directory="distributed.loggers.tensorboard:check_directory",
    ),
    LoggerRow(
        "profile", "distributed.loggers.profiling:make", "distributed.loggers.profiling:is_on",
        check="distributed.loggers.profiling:check",
    ),
    LoggerRow("display", "distributed.loggers.progress:make"),
    LoggerRow(
        "mlflow", "distributed.loggers.mlflow:make", "distributed.loggers.base:is_on_mlflow",
        check_library="distributed.loggers._mlflow.tracking_uri:check",
        environ_of_workers="distributed.loggers._mlflow.tracking_uri:environ_of_open_run",
        record="mlflow.json", environ_of_run="distributed.loggers.mlflow:recorded_environ",
        end="distributed.loggers.mlflow:end_without_workers",
    ),
]  # fmt: skip


def in_use(merged: MergedConfig) -> Iterator[LoggerRow]:
    """Yield the loggers that the settings switch on."""
    return (row for row in LOGGERS if row.is_in_use(merged))


def used_in(run_dir: Path) -> Iterator[LoggerRow]:
    """Yield the loggers that left their record in `run_dir`."""
    return (row for row in LOGGERS if row.record and (run_dir / row.record).exists())


def loggers_of(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of this process, in the order in which their hooks are called. All ranks call it."""
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
