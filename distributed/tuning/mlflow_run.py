"""The MLflow run of a sweep, which is the parent of the runs of its trials: what was varied, and the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from distributed.config.merging import MergedConfig
from distributed.errors import DistributedError
from distributed.loggers import mlflow
from distributed.loggers._mlflow.run import metric_name
from distributed.loggers._mlflow.sender import Sender
from distributed.loggers._mlflow.spool import RECORD, RunRecord, logged_params, spool_of
from distributed.loggers._mlflow.tracking_uri import users_uri
from distributed.loggers.base import is_on_mlflow
from distributed.runs.directory import RunDirectory
from distributed.tuning.sweep import OPEN, Sweep, TrialRecord, progress_of

logger = logging.getLogger(__name__)

_ENDS = {"failed": "FAILED", "stopped": "KILLED"}
_FILES = ("sweep.yaml", "sweep.json", "best.yaml", "report.html")


class SweepRun:
    """The MLflow run of one sweep.

    The constructor starts no thread and runs before the sweep. Then call `start()` once, `hear()` for each line of the
    journal, and `close()` at the end.
    """

    def __init__(
        self,
        sweep: Sweep,
        configuration: Mapping[str, Any],
        experiment: str | None,
        script: str,
        warn: Callable[[str], None],
    ) -> None:
        """Choose the experiment: `experiment` if it is given, otherwise the name of `script`, so that all sweeps
        of a script share one."""
        self._sweep, self._dir, self._warn = sweep, sweep.directory.absolute(), warn
        self._record, self._uri = RunRecord.chosen(self._dir, experiment, script)
        self._record.tags = {"distributed.run_dir": self._dir.name}
        self._record.write(self._dir)  # the trials read this file
        self._configuration = dict(_flat({"metric": sweep.metric, "mode": sweep.mode, **configuration}))
        self._spool = spool_of(self._dir)
        self._sender = Sender(self._dir, self._record, self._spool, self._uri, warn)
        self._trials = ThreadPoolExecutor(1, "mlflow-trials")
        self._is_started = self._is_silent = False

    def start(self) -> None:
        """Start sending, and wait for the run to exist, because the runs of the trials refer to it. Imports MLflow."""
        mlflow.import_quietly()
        self._before = mlflow.retry_once()
        self._is_started = True
        logged = logged_params(self._spool.open())
        now = {metric_name(name): str(value) for name, value in self._configuration.items()}
        new = {name: value for name, value in now.items() if logged.get(name) != value}
        if new:  # MLflow does not let a parameter change, so a value that a resume changed is logged under a new name
            step = self._num_ended
            values = {f"{name}.from_step_{step}" if name in logged else name: value for name, value in new.items()}
            self._put({"kind": "params", "values": values})
        self._put({"kind": "tags", "values": self._record.tags})
        self._put({"kind": "status", "status": "RUNNING", "time": _now()})
        self._sender.start()
        if not self._sender.is_open.wait(mlflow.patience(self._dir, self._uri)):
            self._sender.warn_once("has not answered yet")

    def hear(self, line: Mapping[str, Any]) -> None:
        """Send the result of a trial that ended. Called with each line after it was written to the journal."""
        if line["event"] != "ended":
            return
        trial = self._sweep.records[line["trial"]]
        best = self._sweep.best()
        row = {} if best is None else best.best_row(self._sweep.metric, self._sweep.mode) or {}
        name = metric_name(f"best_{self._sweep.metric}")
        values = {name: row.get(self._sweep.metric), "trial_hours": self._sweep.trial_hours}
        self._put({"kind": "metrics", "time": _now(), "step": self._num_ended, "values": _numbers(values)})
        self._trials.submit(self._end_trial, trial)

    def close(self, status: str) -> None:
        """Send the result of the sweep and its files. Call it after `sweep.json` was written.

        Args:
            status: "FINISHED", "FAILED" or "KILLED".
        """
        if not self._is_started:
            return
        best = self._sweep.best()
        if best is not None:
            config = best.best_config(self._sweep.metric, self._sweep.mode)
            values = {"best_trial": best.name, **{f"best.{name}": str(value) for name, value in config.items()}}
            self._put({"kind": "tags", "values": {metric_name(name): value for name, value in values.items()}})
        self._put({"kind": "status", "status": status, "time": _now()})
        for name in _FILES:
            if (self._dir / name).exists():
                self._put({"kind": "artifact", "path": name, "to": ""})
        limits = () if status == "FINISHED" else (mlflow.INTERRUPTED_S, mlflow.INTERRUPTED_LIMIT_S)
        is_done = self._sender.finish(*limits)
        self._trials.shutdown()
        self._spool.close()
        mlflow.retry_as_before(self._before)
        if not is_done:
            self._sender.warn_once("has not accepted all records")

    @property
    def _num_ended(self) -> int:
        return sum(trial.status not in OPEN for trial in self._sweep.records.values())

    def _end_trial(self, trial: TrialRecord) -> None:
        """Write a run for a trial that has none, because its function uses no Trainer, and end the run of a trial
        whose process died. Runs in a thread."""
        directory = self._sweep.trial_dir(trial.number)
        try:
            if not (directory / RECORD).exists():
                _write_run(directory, trial)
            elif trial.status != "failed":
                return
            is_sent = self._sender.run_id is not None and not self._is_silent
            if not mlflow.end_run(RunDirectory(directory), _ENDS.get(trial.status, "FINISHED"), is_sent):
                self._is_silent = True
        except (OSError, DistributedError) as error:
            self._warn(f"trial {trial.name} could not be logged to MLflow: {error}")

    def _put(self, entry: Mapping[str, Any]) -> None:
        try:
            self._spool.append(entry)
        except OSError as error:  # with a full disk, lines of the log are lost, but the sweep goes on
            logger.warning("%s cannot be written (%s): a line is lost", self._spool.path, error.strerror)


def environ_of_trials(merged: MergedConfig) -> dict[str, str]:
    """Return the environment variables with which trials, also on other machines, find the tracking URI named in
    this process."""
    if not is_on_mlflow(merged):
        return {}
    uri = users_uri()
    return {} if uri is None else {"MLFLOW_TRACKING_URI": uri}


def _write_run(directory: Path, trial: TrialRecord) -> None:
    """Write the run of a trial that logged nothing to MLflow itself into its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    RunRecord.chosen(directory, None, "")[0].write(directory)
    spool = spool_of(directory)
    spool.open()
    for entry in _entries(trial):
        spool.append(entry)
    spool.close()


def _entries(trial: TrialRecord) -> Iterator[dict[str, Any]]:
    yield {"kind": "status", "status": "RUNNING", "time": _now()}
    yield {"kind": "params", "values": {metric_name(name): str(value) for name, value in trial.config.items()}}
    for number, row in enumerate(trial.rows):
        values = {metric_name(name): value for name, value in _numbers(row).items()}
        yield {"kind": "metrics", "time": _now(), "step": progress_of(row, number + 1), "values": values}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in row.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values as GROUP.NAME and leave out empty ones. A dimension of the search space is one value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and prefix != "search_space.":
            yield from _flat(value, f"{prefix}{name}.")
        elif value not in (None, [], {}):
            yield f"{prefix}{name}", value


def _now() -> int:
    return int(time.time() * 1000)


def run_of_sweep(
    sweep: Sweep, merged: MergedConfig, script: str, configuration: Mapping[str, Any], warn: Callable[[str], None]
) -> SweepRun | None:
    """Return the MLflow run of a sweep of `script`, or None if the settings of its trials do not ask for MLflow."""
    if not is_on_mlflow(merged):
        return None
    return SweepRun(sweep, configuration, merged.config.mlflow_experiment, Path(script).stem, warn)
