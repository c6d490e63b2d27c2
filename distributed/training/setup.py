"""Merge the settings of a Trainer, plan its processes and make its backend."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.backends import make_backend
from distributed.backends.base import Backend
from distributed.backends.starting import Starting
from distributed.callbacks import Callback
from distributed.config.fields import rules
from distributed.config.merging import MergedConfig, Overrides, joined, merge, read_config_file, split_sweep
from distributed.config.plan import ProcessPlan, choose_backend, plan_processes
from distributed.config.registry import backend_class, backend_row, groups_in_use, pinned_backend, starting_of
from distributed.config.settings import CHECKPOINTS, MONITORING, DistributedConfig, canonical
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.request import handover, launched_by, running_script
from distributed.loggers import registry as loggers
from distributed.state import Job
from distributed.training.trial import current


class Setup:
    """Hold what a Trainer trains, its settings, its process plan and its backend.

    Args:
        owner: name of the Trainer's class, for messages.
        pinned: backend that the class pins, or None.
        job, callbacks: what is trained.
        config, settings: the arguments of `Trainer`.

    Raises:
        ConfigError, ResourceError: in the parent and in every worker, before any rank joins the others.
    """

    def __init__(
        self,
        owner: str,
        pinned: str | None,
        job: Job,
        callbacks: list[Callback],
        config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
    ) -> None:
        self._owner, self._pinned = owner, pinned
        self.job, self.callbacks = job, callbacks
        self.code, self.sweep, self.hyperparameters, self._notices = self._settings(config, settings)
        if (trial := current()) is not None:
            self.sweep = joined(trial.settings, self.sweep)
        self.worker = worker_environment()  # None in a process that no launcher started
        # Number of this attempt: above 0 if a launcher started the workers again after a failure.
        self.restart_count = self.worker.restart_count if self.worker is not None else 0
        self.handover = handover()
        self.overrides = self._read(config)
        self.merged = self.merge({})
        self.plan = self._plan(self.merged)
        self._check_backend()
        self._check_source()
        _check_warmup(self.merged)
        loggers.check(self.merged)
        self.backend: Backend[Any] = make_backend(self.merged, self.plan)
        self.starting: Starting = starting_of(self.plan.backend)
        self.is_fit_in_workers = self.worker is None and self.starting.is_fit_in_workers(self.plan)
        self.backend.check(self.job, here=not self.is_fit_in_workers)
        self.is_search = False  # whether a search for a learning rate or a batch size made this setup
        self.keeps_checkpoints = True  # False where a search tries a batch size
        self.search_dir: Path | None = None  # the run directory of a search that starts workers

    def for_search(
        self, settings: Mapping[str, Any], *, job: Job, callbacks: Sequence[Callback] = (), **sweep: Any
    ) -> Setup:
        """Return a setup for a search that trains `job`.

        It has the settings of this setup without those for checkpoints, logging and schedules. `settings` replaces settings in
        code. `sweep` replaces settings that also override the batch size of a DataLoader.
        """
        search = copy.copy(self)
        search.is_search = True
        search.job, search.callbacks = job, list(callbacks)
        dropped = {name for name, rule in rules(DistributedConfig).items() if rule.group in (MONITORING, CHECKPOINTS)}
        dropped |= {*settings, *sweep, "monitor", "monitor_mode", "early_stopping_patience", "scheduler_interval"}
        file, flag = (_kept(layer, dropped) for layer in (self.overrides.file, self.overrides.flag))
        search.overrides = dataclasses.replace(self.overrides, file=file, flag=flag, notices=())
        search.sweep = {**_kept(self.sweep, dropped), **sweep}
        search.code = {**_kept(self.code, dropped), **settings}
        search.merged = search.merge({})
        search.backend = make_backend(search.merged, search.plan)
        return search

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, or the process that called `fit`."""
        return self.worker is None or self.worker.rank == 0

    @property
    def on_epoch(self) -> Callable[[Mapping[str, Any]], None] | None:
        """Function that gets the row of each finished epoch in the process that called `fit`, or None.

        It is that of the trial, or else that of the backend.
        """
        if self.is_search:
            return None
        trial = current()
        return trial.report if trial is not None else self.starting.on_epoch(self.merged.config)

    def _read(self, config: Any) -> Overrides:
        """Return the settings from flags and files. Those from outside of the script override the file that the script names."""
        overrides = self.handover.overrides if self.handover is not None else running_script()
        if not isinstance(config, (str, os.PathLike)):
            return overrides
        read = read_config_file(config)
        file = joined(joined(read.file, read.flag), overrides.file)
        return dataclasses.replace(overrides, file=file, notices=(*overrides.notices, *read.notices))

    def _settings(
        self, config: Any, settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
        """Return (settings in code, settings of a sweep, its other hyperparameters, notices)."""
        code: dict[str, Any] = {}
        sweep: dict[str, Any] = {}
        others: dict[str, Any] = {}
        notices: list[str] = []
        if isinstance(config, DistributedConfig):
            code, notices = dict(config.given), list(config.notices)
        elif isinstance(config, Mapping):
            sweep, others, notices = split_sweep(config)
        elif not isinstance(config, (str, os.PathLike, type(None))):
            raise ConfigError(
                f"config is a {type(config).__name__}: pass a DistributedConfig, the path of a file or a dict of settings"
            )
        direct, more_notices = canonical(self._flat_options(settings), self._own_options())
        code = joined(code, direct)
        if self._pinned is not None:
            self._pinned, option = pinned_backend(self._pinned, code)
            more_notices += [] if option is None else [f"{option} selects backend {self._pinned}"]
        return code, sweep, others, notices + more_notices

    def _flat_options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return `settings` with the options of a pinned backend, which may be given without its name, under full names."""
        if self._pinned is None:
            return dict(settings)
        group, options = backend_row(self._pinned).group, self._own_options()
        return {f"{group}.{name}" if name in options else name: value for name, value in settings.items()}

    def _own_options(self) -> list[str]:
        """Return the names of the pinned backend's options."""
        return [] if self._pinned is None else list(backend_class(self._pinned).Options.__dataclass_fields__)

    def merge(self, more: Mapping[str, Any]) -> MergedConfig:
        """Return the merged settings of all sources. `more` overrides the settings in code.

        Raises:
            ConfigError: if the settings contradict each other.
        """
        overrides = self.overrides
        code = {**self.code, **more}
        if self._pinned is not None:
            layers = (overrides.flag, code, self.sweep, overrides.file)
            chosen = next((layer["backend"] for layer in layers if layer.get("backend")), None)
            if chosen not in (None, self._pinned):
                raise ConfigError(
                    f"backend={chosen!r} does not fit {self._owner}, which always uses backend {self._pinned!r}: use Trainer in the script"
                )
            code["backend"] = self._pinned
        merged = merge(overrides, code, self.hyperparameters, self.sweep)
        return MergedConfig(merged.config, merged.sources, merged.hyperparameters, (*self._notices, *merged.notices))

    def _plan(self, merged: MergedConfig) -> ProcessPlan:
        found = self.worker
        if found is None:
            return plan_processes(merged.config)
        config = merged.config
        asked = config.nproc_per_node or config.gpus_per_node
        if asked is not None and asked != found.local_world_size and merged.source("nproc_per_node") != "flag":
            name = "nproc_per_node" if config.nproc_per_node else "gpus_per_node"
            place = "config file" if merged.source(name) == "file" else "script"
            raise ConfigError(
                f"{name}={asked} in the {place} is not the running world's {found.local_world_size} processes per node:"
                f" start with --nproc-per-node {asked}, or drop it from the {place}"
            )
        self._check_nodes(merged)
        wants_gpus = bool(config.num_gpus or config.gpus_per_node)
        is_cpu = config.num_gpus == 0 or (config.device == "cpu" and not wants_gpus)
        device = "cpu" if is_cpu else plan_processes(_local(config, found)).device
        backend = choose_backend(config, found.world_size)
        return ProcessPlan(found.world_size // found.local_world_size, found.local_world_size, device, backend)

    def _check_nodes(self, merged: MergedConfig) -> None:
        """Raise ConfigError if the script gives another number of nodes than our launcher was started with."""
        request, asked = launched_by(), merged.config.num_nodes
        if request is not None and merged.is_given("num_nodes") and asked != request.num_nodes:
            place = "config file" if merged.source("num_nodes") == "file" else "script"
            raise ConfigError(
                f"num_nodes={asked} in the {place} is not the running world's {request.num_nodes}:"
                f" start with --num-nodes {asked}, or drop it from the {place}"
            )

    def _check_backend(self) -> None:
        """Raise ConfigError for a flag that sets an option of a backend that is not used.

        From other sources such an option has no effect.
        """
        used = (*groups_in_use(self.merged.config, self.plan.backend), "data")
        for name, source in self.merged.sources.items():
            group, _, option = name.partition(".")
            if option and group not in used and source == "flag":
                raise ConfigError(
                    f"{name} is an option of another backend than {self.plan.backend!r}: drop it, or set --backend"
                )

    def _check_source(self) -> None:
        """Raise an error if the checkpoint of `resume_from_checkpoint` is missing.

        A run that has begun continues from its own checkpoints and needs it no more.
        """
        source = self.merged.config.resume_from_checkpoint
        is_begun = (self.handover is not None and self.handover.resume) or self.restart_count > 0
        if isinstance(source, str) and not is_begun:
            from distributed.checkpoints.manifest import check_source

            check_source(source)


def _kept(settings: Mapping[str, Any], dropped: set[str]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in dropped}


def _check_warmup(merged: MergedConfig) -> None:
    config = merged.config
    is_overruled = merged.is_overruled("warmup_start", "warmup_steps")
    if config.warmup_start is not None and not config.warmup_steps and not is_overruled:
        raise ConfigError(
            f"warmup_start={config.warmup_start:g} has no effect without a warm-up: set warmup_steps too, or drop it"
        )


def _local(config: DistributedConfig, found: WorkerEnvironment) -> DistributedConfig:
    """Return the resource settings of one node of the running world. They determine the device."""
    if config.num_gpus and config.num_gpus != found.world_size:
        raise ConfigError(
            f"num_gpus={config.num_gpus} in the script is not the running world's {found.world_size} processes:"
            f" start with --num-gpus {config.num_gpus}, or drop it from the script"
        )
    gpus = found.local_world_size if config.num_gpus or config.gpus_per_node else None
    return DistributedConfig(
        device=config.device, nproc_per_node=found.local_world_size, gpus_per_node=gpus, backend=config.backend,
        communication_backend=config.communication_backend,
    )  # fmt: skip
