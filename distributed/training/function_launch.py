"""Run a function in workers, for a plain script or a notebook that runs its own loop."""

from __future__ import annotations

import dataclasses
import linecache
import os
import signal
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from distributed.config.merging import Overrides, joined
from distributed.config.plan import check_nodes
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, TrainingInterrupted
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.reporter import Reporter
from distributed.launching.request import calling, outside_settings
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import interrupts_kept
from distributed.state import Job
from distributed.training.files import is_trial_again
from distributed.training.fit_request import FitRequest
from distributed.training.remote import failure, run_in_workers, sources, take_dir
from distributed.training.setup import SettingLayers, make_setup, read_layers

# Settings that say how many workers are started. They have no effect in workers that run already.
_PROCESSES = ("num_gpus", "num_nodes", "gpus_per_node", "nproc_per_node", "min_nodes", "min_nproc_per_node")


@dataclasses.dataclass
class RemoteCall:
    """Hold a call that is pickled and sent to the workers. Each worker makes it."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sources: dict[str, list[str]]  # file name -> lines of the notebook's cells, for tracebacks

    def __call__(self) -> None:
        linecache.cache.update({name: (0, None, lines, name) for name, lines in self.sources.items()})
        self.function(*self.arguments)


@interrupts_kept()
def launch(
    function: Callable[..., Any],
    *arguments: Any,
    config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Path | None:
    """Call `function(*arguments)` in each of the workers that the settings ask for, and wait for them.

    The workers are started, watched and restarted as those of `Trainer.fit`. The function and its arguments are sent to the workers
    by value, and the value that the function returns is dropped. A `Session` in the function gets the settings, which override its
    own.

    If this process is a worker already, the function is called in this process. The settings apply there too, with two exceptions:
    flags take precedence over them, and the numbers of processes have no effect.

    Args:
        function: the function.
        arguments: its arguments.
        config: settings, as for `Trainer`.
        settings: fields of DistributedConfig, such as `nproc_per_node`, or the options of a backend.

    Returns:
        The run directory, or None in a worker.

    Raises:
        ConfigError: a setting is wrong, or the function cannot be sent.
        ResourceError: a library or a device is missing.
        TrainingError: the function failed in a worker.
        TrainingInterrupted: SIGTERM arrived.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    if not callable(function):
        raise ConfigError(f"launch({function!r}) needs a function: pass one, launch(train, nproc_per_node=2)")
    if (worker := worker_environment()) is not None:
        layers = read_layers("launch", None, config, settings, outside_settings())
        _warn_of_processes(worker, layers)
        with calling(_overrides(layers, without=_PROCESSES)):
            function(*arguments)
        return None
    setup = make_setup("launch", None, Job(None), [], config, settings)
    merged = setup.merged
    check_nodes(merged, setup.plan)
    run = RunDirectory(Path(os.path.relpath(take_dir(FitRequest())))) if merged.config.node_rank == 0 else None
    resume = merged.config.resume_from_checkpoint is not False or is_trial_again()
    if run is not None:
        run.check(resume=resume)
    run_dirs: list[str] = []
    before = run.events_size() if run is not None else 0
    code = run_in_workers(
        RemoteCall(function, arguments, sources()), setup, merged, run, resume=resume,
        on_run_dir=run_dirs.append if run is None else None, overrides=_overrides(setup.layers),
    )  # fmt: skip
    run = RunDirectory(Path(run_dirs[0])) if run is None and run_dirs else run
    if code == 128 + signal.SIGTERM:
        raise TrainingInterrupted(signal.SIGTERM)
    if code:
        raise failure(code, run, before)
    return None if run is None else run.path


def _overrides(layers: SettingLayers, without: Collection[str] = ()) -> Overrides:
    """Return the settings of the workers. They include those of the call, so that a Session need not repeat them."""
    own, outside = joined(layers.sweep, layers.code), layers.overrides
    own = {name: value for name, value in own.items() if name not in without}
    options = [f"{name}.{each}" for name, value in own.items() if isinstance(value, Mapping) for each in value]
    return dataclasses.replace(
        outside,
        flag=joined(own, outside.flag),
        notices=(*layers.notices, *outside.notices),
        hyperparameters={**outside.hyperparameters, **layers.hyperparameters},
        in_call=tuple(option for option in options if not _is_flag(option, outside)),
    )


def _is_flag(option: str, overrides: Overrides) -> bool:
    group, _, name = option.partition(".")
    return name in overrides.flag.get(group, {})


def _warn_of_processes(worker: WorkerEnvironment, layers: SettingLayers) -> None:
    """Warn about each number of processes in the call that differs from the running number and is not given by a flag."""
    per_node = worker.local_world_size
    running = {"num_gpus": worker.world_size, "num_nodes": worker.world_size // per_node}
    running |= {"gpus_per_node": per_node, "nproc_per_node": per_node}
    own, flags, config = joined(layers.sweep, layers.code), layers.overrides.flag, layers.merged.config
    for name in _PROCESSES:
        if name in own and name not in flags and own[name] != running.get(name):
            text = (
                f"{name}={own[name]} of launch() has no effect in a worker, of which {worker.world_size} run:"
                f" start with --{name.replace('_', '-')} {own[name]}, or drop it"
            )
            Reporter(worker.rank == 0, config.verbose)({"kind": "warning", "text": text})
