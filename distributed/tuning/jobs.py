"""What a trial runs: a function of the user's, or a script."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.config.merging import Typed, joined, merge, split_sweep
from distributed.errors import ConfigError, DistributedError, TrainingError
from distributed.launching.engines import seed_generators
from distributed.launching.request import THREAD_VARIABLES
from distributed.launching.worker_server import WorkerServer
from distributed.runs.directory import RunDirectory
from distributed.training.trial import Trial, inside
from distributed.tuning.mlflow_run import environ_of_trials
from distributed.tuning.sweep import as_arguments

_POLL_S = 0.2  # between two looks whether all trials are to stop
_STAMP = r"^\[rank \d+ [\d:]+\] "  # of a line in the log of a rank


@dataclasses.dataclass(frozen=True)
class FunctionJob:
    """`train_fn(config)`: it returns metrics, or a Trainer in it reports each epoch."""

    train_fn: Callable[[dict[str, Any]], Any]
    seed: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of every Trainer in it
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_rows = False  # what it returns may have the metric

    def run(self, trial: Trial, values: Mapping[str, Any], cpus: float) -> Any:
        """Call it, with the generators of the process seeded; what it prints goes into the trial's log."""
        seed_generators(self.seed)
        os.environ.update(self.environ)
        trial = dataclasses.replace(trial, settings=self.settings)
        with (
            open(f"{trial.directory}.log", "a", encoding="utf-8", buffering=1) as _Actor.output.log, inside(trial),
            contextlib.redirect_stdout(_Actor.output), contextlib.redirect_stderr(_Actor.output),
        ):  # fmt: skip
            return self.train_fn(dict(values))


def script_job(typed: Typed, metric: str, mode: str, directory: Path) -> ScriptJob:
    """The job of a script's trials; each keeps the checkpoint of its best epoch, unless a monitor was typed."""
    flag = dict(typed.flag)
    if "monitor" not in {**typed.file, **flag}:
        flag |= {"monitor": metric, "monitor_mode": mode}
    threads = {name: value for name in THREAD_VARIABLES if (value := os.environ.get(name))}
    environ = environ_of_trials(merge(typed, {}))
    typed = dataclasses.replace(typed, flag=flag, notices=())
    return ScriptJob(typed, metric, str(directory / ".stop"), threads, environ)


@dataclasses.dataclass(frozen=True)
class ScriptJob:
    """A script under `train`: values are its settings where they have such a name, else its arguments."""

    typed: Typed
    metric: str
    stop_file: str
    threads: Mapping[str, str]  # what the user's environment says of threads
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs_rows = True

    def typed_with(self, values: Mapping[str, Any]) -> Typed:
        """What is typed for a trial."""
        settings, others, _ = split_sweep(values)
        return dataclasses.replace(
            self.typed, flag=joined(self.typed.flag, settings),
            script_args=(*self.typed.script_args, *as_arguments(others)),
            hyperparameters=json.loads(json.dumps(others, default=str)),
        )  # fmt: skip

    def run(self, trial: Trial, values: Mapping[str, Any], cpus: float) -> Any:
        """Launch its workers and report their epochs until they end. Raises DistributedError with the cause."""
        from distributed.launcher.start import launch_request

        request = launch_request(self.typed_with(values), str(trial.directory))
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
            code = server.launch(request, log.fileno(), trial.report)
        if watch.is_stopped:
            raise SystemExit(0)
        if code:
            raise self._failure(cause_of(code, run, before, Path(f"{trial.directory}.log")))

    def _failure(self, cause: str) -> DistributedError:
        """The metric is the monitor of the runs too, and they see first that nobody reports it."""
        unknown = f"monitor={self.metric!r} is not reported"
        return UnknownMetric(f"metric{cause[7:]}") if cause.startswith(unknown) else TrainingError(cause)

    def _share(self, cpus: float) -> None:
        """The threads of each process: its share of the trial's CPUs, unless the user said."""
        for name in THREAD_VARIABLES:
            os.environ[name] = self.threads.get(name) or self.threads.get("OMP_NUM_THREADS") or str(max(1, int(cpus)))


class UnknownMetric(ConfigError):
    """No trial will ever have the metric: the search is wrong, not this trial."""


class _StopWatch:
    """Stops a trial once the stop file is there: between two epochs nobody else hears of it."""

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
    """Where a function prints: the log of the trial that runs. A handler of `logging` keeps the stream that it was made with."""

    log: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.log, name)


class _Actor:
    """What stays in the process of a trial for the next one."""

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
    """Why a launcher ended with `code`, in one line: what its journal says, else the last words in its log."""
    if (event := run.last_failure(events_before)) is not None:
        return _told(event, run)
    said = list(_words(log))
    return said[-1].removeprefix("error: ") if said else f"the launcher ended with code {code}"


def _told(event: Mapping[str, Any], run: RunDirectory) -> str:
    """Its cause; where a process just left, with the last thing that it said."""
    cause = str(event["cause"])
    said = list(_words(run.logs / f"rank-{event['rank']}.log")) if " exited with code " in cause else []
    return f"{cause}: {re.sub(_STAMP, '', said[-1])}" if said else cause


def _words(log: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip())


def one_line(error: BaseException) -> str:
    """An error as a table has it."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DistributedError) and text else f"{type(error).__name__}: {text}".rstrip(": ")
