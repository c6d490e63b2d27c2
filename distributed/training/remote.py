"""Run `fit` from a plain script or a notebook in workers.

The workers are started for the fit. The trained weights and the history come back from their run directory.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from distributed.backends import entry_in_use
from distributed.callbacks.of_fit import load_states
from distributed.checkpoints.store import read_state
from distributed.config.merging import MergedConfig, Overrides
from distributed.config.plan import check_nodes, plan_batch, starting_line
from distributed.config.settings import GROUPS
from distributed.errors import BY_EXIT_CODE, ConfigError, DistributedError, TrainingError, TrainingInterrupted
from distributed.launching.causes import signal_name
from distributed.launching.engines import active_profiler, picklable
from distributed.launching.exposure import warnings_of
from distributed.launching.reporter import Reporter
from distributed.launching.request import LaunchRequest, make_request
from distributed.launching.subprocess_launch import start_launcher
from distributed.loggers.registry import environ_of_workers
from distributed.metrics.monitor import check_monitor
from distributed.runs.directory import RunDirectory, choose_run_dir, script_name
from distributed.runs.history import History
from distributed.runs.summary import read_result, resume_lines, resume_setting
from distributed.training.files import is_first_trainer, is_trial_again, own_checkpoint_dir, take_run_dir
from distributed.training.fit_request import FitRequest
from distributed.training.setup import Setup
from distributed.training.validation import check_targets, sets_of

if TYPE_CHECKING:
    from distributed.state import TrainState
    from distributed.training.fits import Fits

_INTERRUPTED, _PREEMPTED = 128 + signal.SIGINT, 128 + signal.SIGTERM


@dataclasses.dataclass(frozen=True)
class Remote:
    """Hold the run directory of a trainer's fits in workers and the checkpoint of the last one."""

    run_dir: Path  # absolute, because the caller may change its working directory
    checkpoint: Path
    epoch: int
    step: int

    def copy_checkpoint(self, target: Path) -> Path:
        """Copy the last checkpoint into the directory `target` and return the path of the copy.

        Raises:
            ConfigError: if the copy exists already.
        """
        path = target / self.checkpoint.name
        if path.exists():
            raise ConfigError(f"{path} already exists: name another path")
        target.mkdir(parents=True, exist_ok=True)
        staged = target / f".tmp-{path.name}"
        shutil.copytree(self.checkpoint, staged)
        staged.rename(path)
        return path


class FittedTrainer(Protocol):
    """Describe the `Trainer` that workers create from the class that is sent to them."""

    setup: Setup

    def fit(self, train_data: Any, val_data: Any = None) -> History:
        """Train the model and return the history, as `Trainer.fit` does."""


@dataclasses.dataclass
class RemoteFit:
    """Hold a fit that is pickled and sent to the workers. Each worker calls it."""

    trainer_class: Callable[..., FittedTrainer]
    arguments: dict[str, Any]
    settings: dict[str, Any]
    train_data: Any
    val_data: Any
    sources: dict[str, list[str]]  # file name -> lines of the notebook's cells, for tracebacks

    def __call__(self) -> None:
        linecache.cache.update({name: (0, None, lines, name) for name, lines in self.sources.items()})
        self.fit(self.trainer_class(**self.arguments, **self.settings))

    def fit(self, trainer: FittedTrainer) -> None:
        """Train with the trainer that the worker has created. A subclass may use the trainer for something else."""
        trainer.fit(self.train_data, self.val_data)


FitT = TypeVar("FitT", bound=RemoteFit)


def fit_in_workers(fits: Fits, settings: Mapping[str, Any], train_data: Any, val_data: Any) -> History:
    """Train in workers of this node, load the trained weights into the model of `fits`, and return the history.

    `settings` are the settings given to this fit. The weights are also loaded after a signal, before KeyboardInterrupt or
    TrainingInterrupted is raised.
    """
    setup, before = fits.setup, fits.remote
    merged = setup.merge_for_fit(settings)
    check_here(setup, merged, train_data, val_data)
    is_again = is_trial_again() and setup.request.is_resumable
    resume = before is not None or merged.config.resume_from_checkpoint is not False or is_again
    directory, run = None, None
    if merged.config.node_rank == 0 or not is_first_trainer():
        directory = before.run_dir if before is not None else fits.run_dir or take_dir(setup.request)
        run = RunDirectory(os.path.relpath(directory))
    if run is not None and merged.config.node_rank == 0:
        run.check(resume=resume)
    fit = remote_fit(RemoteFit, fits, merged, directory, train_data, val_data)
    events_before = run.events_size() if run is not None else 0
    _warn_of_profiler(merged.config.verbose)
    run_dirs: list[str] = []
    try:
        on_run_dir = run_dirs.append if run is None else None
        code = run_in_workers(fit, setup, merged, run, resume=resume, on_run_dir=on_run_dir)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if run is None and run_dirs:  # node 0 has named the run directory
        run = RunDirectory(os.path.relpath(take_run_dir(lambda: Path(run_dirs[0]).absolute())))
    if code not in (0, _INTERRUPTED, _PREEMPTED):
        raise failure(code, run, events_before)
    history = _take_back(fits, run) if run is not None else None
    is_interrupted = code in (_INTERRUPTED, _PREEMPTED)
    if is_interrupted and fits.remote is not None and history is not None and setup.request.is_resumable:
        text = resume_lines(resume_setting(Path(os.path.relpath(fits.remote.checkpoint))))
        Reporter(True, merged.config.verbose)({"kind": "notice", "text": text})
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    if history is None and code == 0:  # on a node that came late
        raise TrainingError("the run had ended before this node could take part: node 0 has its checkpoints")
    if history is None or code == _PREEMPTED:
        raise TrainingInterrupted(signal.SIGTERM)
    return history


def remote_fit(
    kind: type[FitT], fits: Fits, merged: MergedConfig, directory: Path | None, train_data: Any, val_data: Any = None
) -> FitT:
    """Return a fit of `fits` that can be sent to workers. `directory` is their run directory, or None if node 0 names it."""
    return kind(
        fits.trainer_class, _arguments(fits.setup, merged), _settings(fits, merged, directory), picklable(train_data), picklable(val_data),
        sources(),
    )  # fmt: skip


def run_in_workers(
    job: Callable[[], None], setup: Setup, merged: MergedConfig, run: RunDirectory | None, *, resume: bool = False,
    on_run_dir: Callable[[str], None] | None = None, overrides: Overrides | None = None,
) -> int:  # fmt: skip
    """Start workers that call `job`, wait for them, and return the exit code of their launcher.

    `run` is None if node 0 is to name the run directory. `on_run_dir` is called with its path, once the nodes have joined.
    `overrides` are the settings that the workers get, by default those from outside of the script.
    """
    with tempfile.TemporaryFile() as payload:  # the file has no name, so that nothing is left behind
        payload.write(_pickled(job))
        payload.flush()
        where = "" if run is None else str(run.path)
        return start_launcher(
            _request(setup, merged, where, payload.fileno(), resume, overrides), setup.on_epoch, on_run_dir
        )


def take_dir(request: FitRequest) -> Path:
    """Return the run directory of one more trainer whose workers are started here.

    The path is absolute, because the caller may change its working directory.
    """
    return take_run_dir(lambda: choose_run_dir(script_name()).absolute(), request.directory_name).absolute()


def check_here(setup: Setup, merged: MergedConfig, train_data: Any, val_data: Any) -> None:
    """Raise ConfigError, before any worker starts, if the workers would refuse the settings or the data."""
    check_nodes(merged, setup.plan)
    plan_batch(merged, setup.backend.data_parallel_size, setup.backend.batch_size_of(train_data))
    sets = sets_of(val_data, setup.job.metrics)
    check_monitor(merged, list(sets), setup.job)
    check_targets(setup.job, train_data, sets)


def _warn_of_profiler(verbose: bool) -> None:
    profiler = active_profiler()
    if profiler is not None:
        text = (
            f"the active {profiler} sees this process only, but the model trains in workers: open the profiler in the"
            " script and run that under 'python -m distributed.cli train --script', or set nproc_per_node=1"
        )
        Reporter(True, verbose)({"kind": "warning", "text": text})


def _arguments(setup: Setup, merged: MergedConfig) -> dict[str, Any]:
    job = setup.job
    arguments = {
        "model": job.model, "config": {**setup.layers.sweep, **setup.layers.hyperparameters}, "optimizer": job.optimizer, "scheduler": job.scheduler,
        "loss_fn": job.loss_fn, "training_step": job.training_step, "metrics": job.metrics, "callbacks": setup.callbacks,
        "processing_class": job.processing_class, "collate_fn": job.collate_fn,
        "predict_with_generate": job.predict_with_generate, "generation_config": job.generation_config,
        "loggers": [*(merged.config.logger_names if merged.source("loggers") == "code" else ()), *setup.loggers] or None,
    }  # fmt: skip
    if job.names:
        of_one = {"models": dict(job.model.items()), "optimizers": job.optimizer, "schedulers": job.scheduler}
        arguments = {**arguments, "model": None, "optimizer": None, "scheduler": None, **of_one}
    # An optimizer and a schedule may also be named in the settings, which are passed beside these arguments.
    return {name: value for name, value in arguments.items() if value is not None}


def _settings(fits: Fits, merged: MergedConfig, directory: Path | None) -> dict[str, Any]:
    """Return the settings of the trainer in the workers: those given in code, and those by which a further fit continues."""
    config = merged.config
    settings = {name: value for name, value in config.to_dict().items() if merged.source(name) == "code"}
    settings.pop("loggers", None)  # an argument of its own
    for group in GROUPS.keys() & settings.keys():
        settings[group] = {o: v for o, v in settings[group].items() if merged.source(f"{group}.{o}") == "code"}
    own = own_checkpoint_dir(config, directory) if directory is not None else None
    if own is not None and own != config.checkpoint_dir:
        settings["checkpoint_dir"] = own
    before = fits.remote
    if before is not None:  # a further fit adds its epochs or steps
        settings["resume_from_checkpoint"] = True
        settings["epochs"] = config.epochs + before.epoch
        if config.max_steps is not None:
            settings["max_steps"] = config.max_steps + before.step
    return settings


def sources() -> dict[str, list[str]]:
    """Return the lines of code that is in no file, such as the cells of a notebook.

    IPython keeps such code in `linecache` without a modification time.
    """
    return {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}


def _pickled(job: Callable[[], None]) -> bytes:
    from distributed.backends.keras_pickling import dumps

    try:
        content = dumps(job)
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise ConfigError(
            f"{_what(job)} cannot be sent to its workers ({error}): pass factories instead of the objects that cannot be sent,"
            " or run the script with 'python -m distributed.cli train --script'"
        ) from None
    return content


def _what(job: Callable[[], None]) -> str:
    return "the trainer" if isinstance(job, RemoteFit) else "the function"


def _request(
    setup: Setup, merged: MergedConfig, run_dir: str, payload: int, resume: bool, overrides: Overrides | None
) -> LaunchRequest:
    plan = setup.plan
    entry = entry_in_use(merged.config, plan.backend)
    return make_request(
        merged, plan, entry, run_dir, overrides=overrides or setup.layers.overrides,
        started_lines=[*warnings_of(merged.config, plan, entry), starting_line(plan, is_elastic=merged.config.is_elastic)],
        payload=f"/proc/self/fd/{payload}", script=sys.argv[0] if sys.argv else None, script_args=tuple(sys.argv[1:]),
        working_dir=str(Path.cwd()), sys_path=tuple(sys.path), resume=resume,
        environ={**entry.environ, **environ_of_workers(merged)},
        launcher=setup.starting.launcher(), launcher_options=setup.starting.launcher_options(merged.config, plan),
    )  # fmt: skip


def failure(
    code: int,
    run: RunDirectory | None,
    events_before: int = 0,
    kinds: Mapping[int, type[DistributedError]] = MappingProxyType({}),
) -> DistributedError:
    """Return the error of a launcher that ended with `code`, with the cause that is in events.jsonl after byte `events_before`.

    `kinds` maps further exit codes to the class of the error.
    """
    kinds = {**BY_EXIT_CODE, **kinds}
    cause = run.last_failure(events_before) if run is not None else None
    if run is None or cause is None:
        killed_by = signal_name(code - 128) if code > 128 else ""
        ended = f"was killed ({killed_by})" if killed_by else f"ended with code {code}: see its message above"
        return kinds.get(code, TrainingError)(f"the launcher of the workers {ended}")
    if code in kinds:
        return kinds[code](cause["cause"])
    log = f" (whole log: {run.logs / 'rank-{rank}.log'.format(**cause)})" if "rank" in cause else ""
    text = f"{cause['cause']}{log}"
    return TrainingError("\n".join([text, cause["traceback"]]) if cause.get("traceback") else text)


def _take_back(fits: Fits, run: RunDirectory) -> History | None:
    """Load the weights of the last checkpoint into the model of this process, and return the history.

    Returns None if training stopped before its first step.
    """
    result = read_result(run.path / "result.json") or {}
    if result.get("checkpoint") is None and result.get("status") != "finished":  # stopped before the first step
        return None
    if result["checkpoint"] is None:
        raise TrainingError(
            f"training ended, but no checkpoint could be written to {run.checkpoints}: see {run.events}"
        )
    checkpoint = (run.path / result["checkpoint"]).absolute()
    state, _ = read_state(checkpoint)
    history = History.of(state, str(run.path), result["total_time"])
    take_up(fits, checkpoint, state, history, Remote(run.path.absolute(), checkpoint, state.epoch, state.step))
    return history


def take_up(fits: Fits, checkpoint: Path, state: TrainState, history: History, remote: Remote | None = None) -> None:
    """Continue with the weights of `checkpoint` and with the states of callbacks in `state`, as after the fit that wrote both."""
    setup = fits.setup
    model = setup.backend.take_weights(setup.job.model, checkpoint)
    load_states(setup.callbacks, state.callbacks)
    fits.take_back(model, history, remote)
