"""The registry of loggers: one entry each. A new logger is one file plus one entry here.

A function of an entry is named as "module:function" and imported when it is called, so that a logger that is off costs nothing.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.callbacks import Callback
    from distributed.config.merging import MergedConfig
    from distributed.loggers.base import LoggedFit
    from distributed.runs.directory import RunDirectory


@dataclasses.dataclass(frozen=True)
class LoggerEntry:
    """Facts about a logger that the rest of the package can read without importing it.

    Each field but `name` and `record` names a function; "" stands for one that does nothing.

    Attributes:
        name: the name of the logger.
        is_named: whether it is on only if the setting `loggers` names it.
        make: `(LoggedFit) -> list[Callback]`, the loggers of this process. All ranks call it.
        is_on: `(MergedConfig) -> bool`; "" for a logger that is always on. The fields marked * are called only if it is on.
        check: `(MergedConfig) -> None`, raises ConfigError for settings that are wrong or have no effect.
        check_callbacks: `(MergedConfig, callbacks) -> None`, raises ConfigError for a callback that needs this logger while it is off.
        check_library: * `(MergedConfig) -> None`, raises ResourceError if a library is missing. Imports nothing heavy.
        check_directory: * `(MergedConfig) -> None`, raises ConfigError if a directory that the user set cannot be written.
        environ_of_workers: * `(MergedConfig) -> dict`, the variables by which the workers of a `fit` continue the log that is open
            in this process.
        record: the file in the run directory that shows that the logger was used. The two functions below are called only if it
            exists.
        environ_of_run: `(run directory) -> dict`, the variables for the workers of a further attempt.
        end: `(RunDirectory, exit code) -> None`, called by the launcher after a failure, when no worker may be left to end the log.
    """

    name: str
    make: str
    is_on: str = ""
    check: str = ""
    check_callbacks: str = ""
    check_library: str = ""
    check_directory: str = ""
    environ_of_workers: str = ""
    record: str = ""
    environ_of_run: str = ""
    end: str = ""
    is_named: bool = False

    def call(self, function: str, *arguments: Any) -> Any:
        """Call one of the functions above by its field's name. Return None if this logger has none."""
        name = getattr(self, function)
        return pkgutil.resolve_name(name)(*arguments) if name else None

    def is_in_use(self, merged: MergedConfig) -> bool:
        """Return whether the settings switch this logger on."""
        if self.is_named:
            return self.name in merged.config.logger_names
        return not self.is_on or bool(self.call("is_on", merged))


# In the order in which their hooks are called.
LOGGERS: list[LoggerEntry] = [
    LoggerEntry("files", "distributed.loggers.files:make"),
    LoggerEntry(
        "tensorboard", "distributed.loggers.tensorboard:make", "distributed.loggers.tensorboard:is_on",
        check="distributed.loggers.tensorboard:check", check_callbacks="distributed.loggers.tensorboard:check_callbacks",
        check_library="distributed.loggers.tensorboard:check_library",
        check_directory="distributed.loggers.tensorboard:check_directory",
    ),
    LoggerEntry(
        "profile", "distributed.loggers.profiling:make", "distributed.loggers.profiling:is_on",
        check="distributed.loggers.profiling:check",
    ),
    LoggerEntry("csv", "distributed.loggers.csv_file:make", is_named=True),
    LoggerEntry(
        "delivered", "distributed.loggers.delivery:make", check_library="distributed.loggers.plugins:check_libraries",
    ),
    LoggerEntry("display", "distributed.loggers.progress:make"),
    LoggerEntry(
        "mlflow", "distributed.loggers.mlflow:make", "distributed.loggers.base:is_on_mlflow",
        check_library="distributed.loggers._mlflow.tracking_uri:check",
        environ_of_workers="distributed.loggers._mlflow.tracking_uri:environ_of_open_run",
        record="mlflow.json", environ_of_run="distributed.loggers.mlflow:recorded_environ",
        end="distributed.loggers.mlflow:end_without_workers",
    ),
]  # fmt: skip


def in_use(merged: MergedConfig) -> Iterator[LoggerEntry]:
    """Yield the loggers that the settings switch on."""
    return (entry for entry in LOGGERS if entry.is_in_use(merged))


def used_in(run_dir: Path) -> Iterator[LoggerEntry]:
    """Yield the loggers that left their record in `run_dir`."""
    return (entry for entry in LOGGERS if entry.record and (run_dir / entry.record).exists())


def loggers_of(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of this process, in the order in which their hooks are called. All ranks call it."""
    return [logger for entry in in_use(fit.merged) for logger in entry.call("make", fit)]


def check(merged: MergedConfig) -> None:
    """Check the settings and libraries of all loggers.

    Raises ConfigError for settings that do nothing without another one, ResourceError for a library that is missing.
    """
    _check_agreement(merged)
    for entry in LOGGERS:
        entry.call("check", merged)
    check_libraries(merged)


def check_callbacks(merged: MergedConfig, callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for a callback of the user that needs a logger that is off."""
    for entry in LOGGERS if callbacks else ():
        entry.call("check_callbacks", merged, callbacks)


def _check_agreement(merged: MergedConfig) -> None:
    """Raise ConfigError if `loggers` names a logger that its own setting switches off."""
    for name, own in (("tensorboard", "tensorboard"), ("mlflow", "mlflow_tracking")):
        is_off = merged.is_given(own) and not getattr(merged.config, own)
        if name in merged.config.logger_names and is_off:
            raise ConfigError(f"loggers names {name}, but {own}=False switches it off: drop one of them")


def check_libraries(merged: MergedConfig) -> None:
    """Check the libraries of the loggers that are on, and the addresses that they log to. Imports nothing heavy.

    Raises ResourceError with the command that installs a missing library, ConfigError for an address that cannot be one.
    """
    for entry in in_use(merged):
        entry.call("check_library", merged)


def check_directories(merged: MergedConfig) -> None:
    """Create the user's own directories for loggers. Raises ConfigError if one cannot be written."""
    for entry in in_use(merged):
        entry.call("check_directory", merged)


def environ_of_workers(merged: MergedConfig) -> dict[str, str]:
    """Return the variables by which the workers of a `fit` continue a log that is open in this process, such as an MLflow run."""
    environ: dict[str, str] = {}
    for entry in in_use(merged):
        environ |= entry.call("environ_of_workers", merged) or {}
    return environ


def environ_of_run(run_dir: Path) -> dict[str, str]:
    """Return the variables by which the workers of a further attempt at the run of `run_dir` continue its logs."""
    environ: dict[str, str] = {}
    for entry in used_in(run_dir):
        environ |= entry.call("environ_of_run", run_dir) or {}
    return environ


def end_elsewhere(run: RunDirectory, code: int) -> None:
    """Call `end` of each logger that a failed run used. Do nothing if the exit code `code` is 0. Launcher only.

    The workers of a failed run may have ended without closing their loggers.
    """
    for entry in used_in(run.path) if code else ():
        entry.call("end", run, code)
