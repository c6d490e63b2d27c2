"""Jobs of trials: a function of the user, or a script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.config.merging import Overrides, joined, merge, split_sweep
from distributed.errors import ConfigError, DistributedError, TrainingError
from distributed.launching.engines import seed_generators
from distributed.launching.variables import THREAD_VARIABLES
from distributed.launching.worker_server import WorkerServer
from distributed.runs.directory import RunDirectory
from distributed.runs.log_tail import last_line, tail
from distributed.training.trial import Trial, inside
from distributed.tuning.mlflow_run import environ_of_trials
from distributed.tuning.sweep import as_arguments

_POLL_S = 0.2  # time between two checks for the stop file


@dataclasses.dataclass(frozen=True)
class FunctionJob:
    """Job that calls `train_fn(config)`. The function returns metrics, or a Trainer in it reports each epoch."""

    train_fn: Callable[[dict[str, Any]], Any]
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings of every Trainer in the function
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_rows = False  # the returned value may contain the metric

    def run(self, trial: Trial, values: Mapping[str, Any], cpus: float) -> Any:
        """Seed the generators of the process and call the function. Its output goes to the log of the trial."""
        seed_generators(self.seed)
        os.environ.update(self.environ)
        trial = dataclasses.replace(trial, settings=self.settings)
        with (
            open(f"{trial.directory}.log", "a", encoding="utf-8", buffering=1) as _Actor.output.log, inside(trial),
            contextlib.redirect_stdout(_Actor.output), contextlib.redirect_stderr(_Actor.output),
        ):  # fmt: skip
            return self.train_fn(dict(values))


def script_job(overrides: Overrides, metric: str, mode: str, directory: Path) -> ScriptJob:
    """Return the job of a script's trials. Each trial keeps the checkpoint of its best epoch, unless the user set a
    monitor."""
    flag = dict(overrides.flag)
    if "monitor" not in overrides.values():
        flag |= {"monitor": metric, "monitor_mode": mode}
    threads = {name: value for name in THREAD_VARIABLES if (value := os.environ.get(name))}
    environ = environ_of_trials(merge(overrides, {}))
    overrides = dataclasses.replace(overrides, flag=flag, notices=())
    return ScriptJob(overrides, metric, str(directory / ".stop"), threads, environ)


@dataclasses.dataclass(frozen=True)
class ScriptJob:
    """Job that runs a script as `train` does. Values with the name of a setting become settings; the others become
    arguments."""

    overrides: Overrides
    metric: str
    stop_file: str
    threads: Mapping[str, str]  # thread variables that the user has set
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_rows = True

    def overrides_with(self, values: Mapping[str, Any]) -> Overrides:
        """Return the settings and arguments of a trial with these values."""
        settings, others, _ = split_sweep(values)
        return dataclasses.replace(
            self.overrides, flag=joined(self.overrides.flag, settings),
            script_args=(*self.overrides.script_args, *as_arguments(others)),
            hyperparameters=json.loads(json.dumps(others, default=str)),
        )  # fmt: skip

    def run(self, trial: Trial, values: Mapping[str, Any], cpus: float) -> Any:
        """Start the workers and report their epochs until they end. Raises DistributedError with the cause of a
        failure."""
        from distributed.launcher.start import launch_request

        request = launch_request(self.overrides_with(values), str(trial.directory))
        request = dataclasses.replace(request, resume=trial.is_again, live=False)
        os.environ.update(self.environ)
        self._share(cpus / request.nproc_per_node)
        run = RunDirectory(trial.directory)
        before = run.events_size()
        server = _worker_server(request.preload)
        with (
            open(f"{trial.directory}.log", "a", encoding="utf-8") as log,
            _StopWatch(self.stop_file, server.stop) as watch,
        ):
            code = server.launch(request, log.fileno(), trial.on_epoch)
        if watch.is_stopped:
            raise SystemExit(0)
        if code:
            raise self._failure(cause_of(code, run, before, Path(f"{trial.directory}.log")))

    def _failure(self, cause: str) -> DistributedError:
        """Return the error for a cause. The metric is also the monitor of the runs, so a run is the first to find that the
        metric is not reported."""
        unknown = f"monitor={self.metric!r} is not reported"
        return UnknownMetric(f"metric{cause[7:]}") if cause.startswith(unknown) else TrainingError(cause)

    def _share(self, cpus: float) -> None:
        """Set the number of threads per process to its share of the trial's CPUs, unless the user set it."""
        for name in THREAD_VARIABLES:
            os.environ[name] = self.threads.get(name) or self.threads.get("OMP_NUM_THREADS") or str(max(1, int(cpus)))


class UnknownMetric(ConfigError):
    """No trial can report the metric, so the whole sweep is wrong and not only this trial."""


class _StopWatch:
    """Stop a trial once the stop file exists. Between two epochs nothing else tells the trial to stop."""

    def __init__(self, file: str, stop: Callable[[], None]) -> None:
        self._file, self._stop, self._over = Path(file), stop, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.is_stopped = False

    def __enter__(self) -> _StopWatch:
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._file.exists():
                self.is_stopped = True
                self._stop()
                return

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class _Output:
    """Stream that writes to the log of the running trial. All trials must use the same object, because handlers of
    `logging` keep their stream."""

    log: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


class _Actor:
    """State of a trial's process that the next trial in the same process uses again."""

    server: WorkerServer | None = None
    output: Any = _Output()


def _worker_server(preload: tuple[str, ...]) -> WorkerServer:
    """Return a server that has imported the modules `preload`. It is created once per process."""
    before = _Actor.server
    if before is not None and before.is_alive and before.preload == preload:
        return before
    if before is not None:
        before.close()
    _Actor.server = WorkerServer(preload)
    return _Actor.server


def cause_of(code: int, run: RunDirectory, events_before: int, log: Path) -> str:
    """Return in one line why a launcher ended with `code`: from its journal, otherwise from the last line of its
    log."""
    if (event := run.last_failure(events_before)) is not None:
        return _cause_in(event, run)
    lines = [line for each in tail(log) if (line := each.decode(errors="replace").strip())]
    return lines[-1].removeprefix("error: ") if lines else f"the launcher ended with code {code}"


def _cause_in(event: Mapping[str, Any], run: RunDirectory) -> str:
    """Return the cause of a failure event. If a process just exited, append its last line of output."""
    cause = str(event["cause"])
    line = last_line(run.logs / f"rank-{event['rank']}.log") if " exited with code " in cause else ""
    return f"{cause}: {line}" if line else cause
