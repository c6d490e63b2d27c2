"""Run a function in workers, for a plain script or a notebook that runs its own loop."""

from __future__ import annotations

import dataclasses
import linecache
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.config.merging import Overrides, joined
from distributed.config.plan import check_nodes
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, TrainingInterrupted
from distributed.launching.environments.registry import worker_environment
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import interrupts_kept
from distributed.state import Job
from distributed.training.fit_request import FitRequest
from distributed.training.remote import failure, run_in_workers, sources, take_dir
from distributed.training.setup import Setup, make_setup


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

    The workers are started, watched and restarted as those of `Trainer.fit`. The function and its arguments are sent to them by
    value; what it returns is dropped. A `Session` in the function gets the settings, which override its own. In a process that is a
    worker already, the function is called there.

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
    if worker_environment() is not None:
        function(*arguments)
        return None
    setup = make_setup("launch", None, Job(None), [], config, settings)
    merged = setup.merged
    check_nodes(merged, setup.plan)
    run = RunDirectory(Path(os.path.relpath(take_dir(FitRequest())))) if merged.config.node_rank == 0 else None
    resume = merged.config.resume_from_checkpoint is not False
    if run is not None:
        run.check(resume=resume)
    told: list[str] = []
    before = run.events_size() if run is not None else 0
    code = run_in_workers(
        RemoteCall(function, arguments, sources()), setup, merged, run, resume=resume,
        on_run_dir=told.append if run is None else None, overrides=_overrides(setup),
    )  # fmt: skip
    run = RunDirectory(Path(told[0])) if run is None and told else run
    if code == 128 + signal.SIGTERM:
        raise TrainingInterrupted(signal.SIGTERM)
    if code:
        raise failure(code, run, before)
    return None if run is None else run.path


def _overrides(setup: Setup) -> Overrides:
    """Return the settings of the workers: those of the call too, so that a Session need not repeat them."""
    layers = setup.layers
    own = joined(layers.sweep, layers.code)
    return dataclasses.replace(layers.overrides, flag=joined(own, layers.overrides.flag))
