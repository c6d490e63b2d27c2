"""DistributedTuner: train one function many times with different values, and keep the best result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import numbers
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from distributed.checkpoints.store import read_state
from distributed.config.addresses import refuse_address
from distributed.config.gpus import visible_gpus
from distributed.config.merging import MergedConfig, Overrides, merge
from distributed.config.settings import canonical
from distributed.errors import ConfigError, ResourceError, TrainingInterrupted
from distributed.launching.engines import seed_generators
from distributed.launching.script import check_script
from distributed.loggers.notebook import in_notebook
from distributed.loggers.registry import check_directories, check_libraries
from distributed.runs.directory import choose_run_dir, script_name
from distributed.runs.history import History
from distributed.training.remote import take_up
from distributed.training.trial import Trial, inside
from distributed.tuning.cell import CellProgress
from distributed.tuning.engine import engine, run_sweep
from distributed.tuning.jobs import FunctionJob, ScriptJob, script_job
from distributed.tuning.mlflow_run import environ_of_trials, run_of_sweep
from distributed.tuning.plan import SHARING, SweepPlan, bundles_of, check_pairing, check_scheduler, mode_of, total
from distributed.tuning.proposals import check_search
from distributed.tuning.results import checkpoint_of
from distributed.tuning.space import Space, make_space
from distributed.tuning.sweep import Sweep, TrialRecord, open_sweep, scores

if TYPE_CHECKING:
    from distributed.training.fits import Fits
    from distributed.tuning.mlflow_run import SweepRun

logger = logging.getLogger(__name__)


class DistributedTuner:
    """Find the values with which `train_fn` gives the best metric, by a sweep over many trials.

    This process runs the sweep; trials run in processes of Ray.

    Args:
        train_fn: a function `train_fn(config)`, or the path of a script. A function returns metrics (a dict, or the
            metric itself), or trains with a `Trainer`, which reports each epoch. A script runs as under `train`: values
            with the name of a setting become settings, the others become arguments.
        search_space: maps each name to a list of choices, `{"loguniform": [1e-4, 1e-1]}`, `{"uniform": [...]}`,
            `{"randint": [...]}` (upper end excluded), a domain of Ray Tune, or a constant.
        metric: name of the metric that is optimised. The best value that a trial reached counts.
        mode: "min" or "max" (default: the direction that the name of the metric implies).
        num_gpus: number of GPUs that all trials together use (default: all visible ones, or those of the cluster).
        trials_per_gpu: number of trials that share one GPU.
        seed: seed of the proposals, and of the generators of each trial.
        resources_per_trial: resources such as `{"cpu": 2}`, or a list of such dicts, one for the trial and one for each
            of its processes.
        scheduler: "asha", "hyperband", "pbt", or None to run every trial to its end.
        scheduler_options: options of the scheduler, such as `{"grace_period": 2}`. One unit of time is an epoch.
        search: the search algorithm: "random", "grid", "optuna" or "bayesopt".
        max_concurrent: number of trials that run at once (default: as many as the resources allow).
        max_failures: how often a crashed trial restarts from its newest checkpoint.
        run_dir: directory of the trials (default: `runs/<script>-<time>-<id>`).
        resume: whether to continue the sweep in `run_dir`.
        address: a Ray cluster to join, HOST:PORT (default: the one that this process is connected to, otherwise a new
            local one).
        settings: fields of DistributedConfig for every trial, such as `mlflow_tracking=True`. Arguments of a Trainer in
            `train_fn` take precedence over these settings. These settings take precedence over those in a script.

    Raises:
        ConfigError: an argument is wrong. Checked before any trial starts.
        ResourceError: a library or GPU is missing. Checked before any trial starts.
    """

    def __init__(
        self,
        train_fn: Callable[[dict[str, Any]], Any] | str | os.PathLike[str],
        search_space: Mapping[str, Any],
        *,
        metric: str = "val_loss",
        mode: str | None = None,
        num_gpus: int | None = None,
        trials_per_gpu: int = 1,
        seed: int = 0,
        resources_per_trial: Any = None,
        scheduler: str | None = None,
        scheduler_options: Mapping[str, float] | None = None,
        search: str = "random",
        max_concurrent: int | None = None,
        max_failures: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        resume: bool = False,
        address: str | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(train_fn, (str, os.PathLike)):
            check_script(os.fspath(train_fn))
        elif not callable(train_fn):
            raise ConfigError(
                f"train_fn is a {type(train_fn).__name__}: pass a function of one argument, the trial's values, or a script"
            )
        mode = mode_of(metric, mode)
        if resume and run_dir is None:
            raise ConfigError("resume=True needs the directory of the sweep: add run_dir")
        self.train_fn, self.metric, self.mode = train_fn, metric, mode
        self.space: Space = make_space(search_space)
        self.scheduler, self.scheduler_options = check_scheduler(scheduler, scheduler_options or {})
        check_pairing(self.scheduler, search, max_concurrent)
        _check_numbers(num_gpus=num_gpus, seed=seed, max_concurrent=max_concurrent, max_failures=max_failures)
        self._settings = _checked(settings, type(self).__init__.__kwdefaults__ or ())
        if not callable(train_fn):
            _check_names(self.space, self._settings)
        is_here = engine().has_own_cluster(address)
        if num_gpus and not is_here and self.scheduler in SHARING:
            raise ConfigError(
                f"num_gpus={num_gpus} has no effect with scheduler={self.scheduler!r} on a cluster, where its trials take turns"
                " on all GPUs: drop it"
            )
        processes = 1 if callable(train_fn) else int(self._settings.get("nproc_per_node") or 1)
        gpus, at_once = _gpus(num_gpus, trials_per_gpu, resources_per_trial, is_here, processes)
        self._bundles = bundles_of({"cpu": processes} if resources_per_trial is None else resources_per_trial, gpus)
        is_open = num_gpus is None and resources_per_trial is None and not gpus
        self._gpus_if_any = float(processes) if is_open and not is_here else 0.0
        self._max_concurrent = min(filter(None, (max_concurrent, at_once)), default=None)
        self._seed, self._search, self._max_failures = seed, search, max_failures
        self._run_dir, self._resume, self._address = run_dir, resume, address
        self._sweep: Sweep | None = None

    def tune(self, num_samples: int | None = None) -> dict[str, Any]:
        """Run the trials and return the values of the best one.

        Args:
            num_samples: number of trials. None runs all combinations of search="grid".

        Returns:
            The values of the best trial, by name.

        Raises:
            TrainingError: every trial failed. The message has the cause of the first failure.
            ConfigError: `num_samples` does not fit the search algorithm, or no trial reported the metric.
            KeyboardInterrupt: Ctrl-C. The trials have saved, and `sweep.json` is written.
            TrainingInterrupted: SIGTERM (exit code 143). The trials have saved, and `sweep.json` is written.
        """
        number = check_search(self._search, self.space, num_samples)
        refuse_address(self._run_dir or "", "a sweep")
        directory = Path(self._run_dir if self._run_dir is not None else choose_run_dir(script_name())).absolute()
        job = self._job(directory)
        plan = SweepPlan(
            directory, job, self.space, self.metric, self.mode, number, self._bundles,
            search=self._search, scheduler=self.scheduler, scheduler_options=self.scheduler_options, seed=self._seed,
            max_concurrent=self._max_concurrent, max_failures=self._max_failures, address=self._address,
            gpus_if_any=self._gpus_if_any,
        )  # fmt: skip
        engine().check_here(plan)  # before the directory is created: a corrected call would refuse an existing one
        check_directories(self._merged())
        sweep = open_sweep(directory, self.metric, self.mode, self._configuration(number), self._resume)
        sweep.recall(self.space)
        self._sweep = sweep
        plan = dataclasses.replace(plan, earlier=tuple(record for record, _ in scores(sweep)))
        listeners = self._listeners(sweep, number)
        status = "FAILED"
        try:
            for each in listeners:
                each.start()
            with _stopping(plan.stop_file) as seen:
                run_sweep(plan, sweep, lambda line: [each.hear(line) for each in listeners])
            status = "KILLED" if seen else "FINISHED"
        finally:
            sweep.interrupt()
            sweep.write()
            sweep.write_best(job.overrides if isinstance(job, ScriptJob) else Overrides())
            for each in listeners:
                each.close(status)
            sweep.run.unlock()
        if seen:
            raise KeyboardInterrupt if seen[0] == signal.SIGINT else TrainingInterrupted(seen[0])
        return self.best_params

    def _job(self, directory: Path) -> FunctionJob | ScriptJob:
        if callable(self.train_fn):
            return FunctionJob(self.train_fn, self._seed, self._settings, environ_of_trials(self._merged()))
        overrides = Overrides(flag={"seed": self._seed, **self._settings}, script=os.fspath(self.train_fn))
        return script_job(overrides, self.metric, self.mode, directory)

    def _merged(self) -> MergedConfig:
        return merge(Overrides(), {}, sweep=self._settings)

    def _listeners(self, sweep: Sweep, number: int) -> list[SweepRun | CellProgress]:
        """Return the displays and logs that follow the sweep."""
        cell = CellProgress(sweep, number) if in_notebook() else None
        script = script_name() if callable(self.train_fn) else os.fspath(self.train_fn)
        tracked = run_of_sweep(sweep, self._merged(), script, self._configuration(number), logger.warning)
        return [each for each in (cell, tracked) if each is not None]

    def _configuration(self, number: int) -> dict[str, Any]:
        space = {name: _written(each) for name, each in self.space.items()}
        return {
            "search": self._search, "scheduler": self.scheduler, "seed": self._seed, "num_samples": number,
            "search_space": space, **({"scheduler_options": dict(self.scheduler_options)} if self.scheduler_options else {}),
            **({"settings": self._settings} if self._settings else {}),
        }  # fmt: skip

    # ------------------------------------------------------------------ results

    @property
    def run_dir(self) -> Path:
        """Directory of the sweep. Raises ConfigError before `tune()`."""
        return self._done().directory

    @property
    def results(self) -> Any:
        """One row per trial, the best first: a pandas DataFrame, or a list of dicts if pandas is not installed.

        Raises:
            ConfigError: the sweep has not run.
        """
        sweep = self._done()
        rows = [_row(sweep, record) for record in sorted(sweep.records.values(), key=sweep.score)]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    @property
    def best_params(self) -> dict[str, Any]:
        """Values of the best trial.

        Raises:
            ConfigError: the sweep has not run, or no trial reported a finite value of the metric.
        """
        sweep = self._done()
        return dict(self._best().best_config(sweep.metric, sweep.mode))

    @property
    def best_checkpoint(self) -> Path:
        """Checkpoint of the best row of the best trial, or the newest checkpoint of the trial if that one was not kept.

        Raises:
            ConfigError: the sweep has not run, no trial reported a finite value of the metric, or the best one saved no checkpoint.
        """
        sweep, best = self._done(), self._best()
        row = best.best_row(self.metric, self.mode) or {}
        found = checkpoint_of(sweep.trial_dir(best.number), row.get("step"))
        if found is None:
            raise ConfigError(f"trial {best.name} saved no checkpoint: train with a Trainer in train_fn")
        return found

    def best_trainer(self) -> Any:
        """Return the Trainer that `train_fn` creates with the best values, with the weights of `best_checkpoint`.

        This calls `train_fn` in this process up to its call of `fit`, which does not train.

        Returns:
            The Trainer, which can evaluate, predict, save and train further.

        Raises:
            ConfigError: the job is a script, the sweep has not run, no trial reported a finite value of the metric, the best trial
                saved no checkpoint, or `train_fn` calls no `fit` of a Trainer.
            CheckpointError: the checkpoint is damaged or does not fit the model.
        """
        if not callable(self.train_fn):
            raise ConfigError(
                "best_trainer() works for a function only: the best run of a script is at best_checkpoint"
            )
        checkpoint, best = self.best_checkpoint, self._best()
        trial = Trial(self._done().trial_dir(best.number), True, lambda row: None, _made, self._settings)
        seed_generators(self._seed)
        try:
            with inside(trial):
                self.train_fn(self.best_params)
        except _Made as made:
            state, _ = read_state(checkpoint)
            take_up(made.fits, checkpoint, state, History.of(state, str(checkpoint.parent.parent), state.total_time))
            return made.trainer
        raise ConfigError("train_fn called no fit of a Trainer: there is no trainer to return")

    def _done(self) -> Sweep:
        if self._sweep is None:
            raise ConfigError("there are no results before tune(): call tune() first")
        return self._sweep

    def _best(self) -> TrialRecord:
        best = self._done().best()
        if best is None:
            raise ConfigError(f"no trial reported a finite {self.metric}: see {self._done().directory / 'sweep.json'}")
        return best


class _Made(BaseException):
    """Carry a Trainer out of the function that would train it."""

    def __init__(self, trainer: Any, fits: Fits) -> None:
        super().__init__("a trainer was made")
        self.trainer, self.fits = trainer, fits


def _made(trainer: Any, fits: Fits) -> None:
    raise _Made(trainer, fits)


def _checked(settings: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return the settings of all trials by their canonical names. `own` are the arguments of the tuner.

    Raises:
        ConfigError: a setting is unknown or cannot be shared by trials.
        ResourceError: the library of a logger is missing.
    """
    named, _ = canonical(settings, own)
    if "checkpoint_dir" in named:
        raise ConfigError("checkpoint_dir would be shared by all trials: drop it, each has its own run directory")
    check_libraries(merge(Overrides(), {}, sweep=named))
    return named


def _check_names(space: Space, settings: Mapping[str, Any]) -> None:
    """Apply the checks of the command line to the search space of a script."""
    from distributed.tuning.scripts import check_names

    check_names(space, Overrides(flag=settings))


def _check_numbers(**counts: Any) -> None:
    """Raise ConfigError for a value that is not an integer or is too small. `num_gpus` and `max_concurrent` may be None."""
    for name, value in counts.items():
        if value is None and name in ("num_gpus", "max_concurrent"):
            continue
        least = 1 if name == "max_concurrent" else 0
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            raise ConfigError(f"{name}={value!r} is not a whole number of at least {least}: set {name}={least} or more")


def _gpus(
    num_gpus: int | None, trials_per_gpu: int, resources: Any, is_here: bool, processes: int
) -> tuple[float, int | None]:
    """Return the GPUs of each trial besides its `resources`, and the number of concurrent trials that follows from
    `num_gpus`.

    A trial has `processes` processes. The resources of a cluster are not known yet.
    """
    if isinstance(trials_per_gpu, bool) or not isinstance(trials_per_gpu, int) or trials_per_gpu < 1:
        raise ConfigError(
            f"trials_per_gpu={trials_per_gpu!r} is less than 1: set 1, or more for trials that share a GPU"
        )
    if trials_per_gpu > 1 and processes > 1:
        raise ConfigError(
            f"trials_per_gpu={trials_per_gpu} needs trials of one process: drop it, or set nproc_per_node=1"
        )
    visible = visible_gpus() if num_gpus != 0 and is_here else 0
    if is_here and (num_gpus or 0) > visible:
        fix = f"set num_gpus={visible}" if visible else "drop it, and trials run on CPUs"
        raise ResourceError(f"num_gpus={num_gpus} is more than the {visible} that this machine shows: {fix}")
    if resources is not None and trials_per_gpu == 1 and (num_gpus is None or _gpus_in(resources)):
        return 0.0, None if num_gpus is None else _trials_on(num_gpus, _gpus_in(resources))
    wanted = visible if num_gpus is None else num_gpus
    if not is_here and num_gpus is None and trials_per_gpu > 1:
        return 1.0 / trials_per_gpu, None
    each = processes / trials_per_gpu
    return (each, max(1, int(wanted / each + 1e-9))) if wanted else (0.0, None)


def _gpus_in(resources: Any) -> float:
    return total(bundles_of(resources)).get("GPU", 0.0)


def _trials_on(num_gpus: int, each: float) -> int:
    """Return how many trials with `each` GPUs fit on `num_gpus`."""
    if num_gpus < each:
        raise ConfigError(
            f"num_gpus={num_gpus} is less than the {each:g} GPU that resources_per_trial gives a trial: set num_gpus to that"
            " or more"
        )
    return int(num_gpus / each + 1e-9)


def _row(sweep: Sweep, record: TrialRecord) -> dict[str, Any]:
    """Return the row of a trial in `DistributedTuner.results`."""
    metrics = record.best_row(sweep.metric, sweep.mode) or {}
    config = record.best_config(sweep.metric, sweep.mode)
    first = {"trial": record.name, "status": record.status}
    last = {
        "epochs": record.epochs,
        "seconds": record.seconds,
        "error": record.error,
        "run_dir": str(sweep.trial_dir(record.number)),
    }
    taken = {*first, *last, sweep.metric}
    values = {f"config.{name}" if name in taken else name: value for name, value in config.items()}
    return {
        **first, **values, sweep.metric: metrics.get(sweep.metric),
        **{name: value for name, value in metrics.items() if name not in values}, **last,
    }  # fmt: skip


def _written(each: Any) -> Any:
    """Return a dimension as YAML represents it."""
    if each.kind == "constant":
        return each.values[0]
    if each.kind == "choice":
        return list(each.values)
    return {each.kind: [] if each.sampler else [each.low, each.high]}


@contextlib.contextmanager
def _stopping(stop_file: Path) -> Iterator[list[int]]:
    """Create the stop file on Ctrl-C or SIGTERM, so that trials save and end. A second Ctrl-C raises KeyboardInterrupt.

    Yields the list of received signals.
    """
    seen: list[int] = []
    stop_file.unlink(missing_ok=True)
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def stop(number: int, frame: FrameType | None) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        stop_file.touch()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        stop_file.unlink(missing_ok=True)
