"""Merge the settings of a Trainer, plan its processes and make its backend."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.backends import backend_class, groups_in_use, make_backend, plan_of, starting_of
from distributed.backends.base import Backend, check_callbacks
from distributed.backends.several import check_several
from distributed.backends.starting import Starting
from distributed.callbacks import Callback
from distributed.config.addresses import check_library
from distributed.config.gpus import visible_gpus
from distributed.config.merging import MergedConfig, Overrides, joined, merge, read_config_file, split_sweep
from distributed.config.optimization import check_named
from distributed.config.plan import ProcessPlan, choose_backend, plan_batch, plan_processes
from distributed.config.registry import backend_entry, pinned_backend
from distributed.config.settings import DistributedConfig, canonical
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.request import Handover, handover, launched_by, outside_settings
from distributed.loggers import registry as loggers
from distributed.loggers.logger import Logger
from distributed.state import Job
from distributed.training.fit_request import FitRequest
from distributed.training.trial import current


@dataclasses.dataclass(frozen=True)
class SettingLayers:
    """The settings of a Trainer in one layer per source, before they are merged.

    Attributes:
        owner: the name of the Trainer's class, for messages.
        pinned: the backend that the class pins, or None.
        code: settings in the script.
        sweep: settings in the dict of a sweep, or of a trial.
        hyperparameters: other values of a sweep.
        overrides: settings from files and flags.
        notices: notices about the settings in the script.
    """

    owner: str
    pinned: str | None
    code: Mapping[str, Any]
    sweep: Mapping[str, Any]
    hyperparameters: Mapping[str, Any]
    overrides: Overrides
    notices: tuple[str, ...]

    @functools.cached_property
    def merged(self) -> MergedConfig:
        """The merged settings. Raises ConfigError if they contradict each other."""
        return self.merge({})

    def merge(self, more: Mapping[str, Any]) -> MergedConfig:
        """Return the merged settings, where `more` overrides those in code. Raises ConfigError if they contradict each other."""
        overrides = self.overrides
        code = {**self.code, **more}
        if self.pinned is not None:
            layers = (overrides.flag, code, self.sweep, overrides.file)
            chosen = next((layer["backend"] for layer in layers if layer.get("backend")), None)
            if chosen not in (None, self.pinned):
                raise ConfigError(
                    f"backend={chosen!r} does not fit {self.owner}, which always uses backend {self.pinned!r}: use Trainer in the script"
                )
            code["backend"] = self.pinned
        merged = merge(overrides, code, self.hyperparameters, self.sweep)
        return dataclasses.replace(merged, notices=(*self.notices, *merged.notices))


class Setup:
    """Hold what a fit trains, with which settings, on which processes and with which backend.

    Args:
        job, callbacks: what is trained.
        layers: the settings by source.
        plan: the processes.
        worker: what a launcher says about this process, or None if no launcher started it.
        handover: what this worker got from our launcher, or None.
        request: what the fit does besides training.
        loggers: the loggers that the user passed as objects.

    Raises:
        ConfigError: if the settings contradict each other, or the backend refuses one.
    """

    def __init__(
        self,
        job: Job,
        callbacks: list[Callback],
        layers: SettingLayers,
        plan: ProcessPlan,
        worker: WorkerEnvironment | None,
        handover: Handover | None,
        request: FitRequest,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.job, self.callbacks, self.layers, self.plan, self.request = job, callbacks, layers, plan, request
        self.loggers = loggers
        self.worker, self.handover = worker, handover
        # Number of this attempt: above 0 if a launcher started the workers again after a failure.
        self.restart_count = worker.restart_count if worker is not None else 0
        self.backend: Backend[Any] = make_backend(self.merged, plan)
        self.starting: Starting = starting_of(plan.backend)
        self.is_fit_in_workers = worker is None and self.starting.is_fit_in_workers(plan)

    def for_request(
        self,
        request: FitRequest,
        job: Job | None = None,
        callbacks: Sequence[Callback] | None = None,
        layers: SettingLayers | None = None,
    ) -> Setup:
        """Return the setup of another fit on the same processes, with a backend of its own. None means: as in this setup."""
        callbacks = self.callbacks if callbacks is None else callbacks
        return Setup(
            job or self.job, list(callbacks), layers or self.layers, self.plan, self.worker, self.handover, request
        )

    def check_job(self) -> None:
        """Raise ConfigError for errors in the job that can be found before processes join each other."""
        check_several(self.backend, self.job)
        self.backend.check(self.job, here=not self.is_fit_in_workers)
        check_callbacks(self.backend, self.callbacks)
        loggers.check_callbacks(self.merged, self.callbacks)

    @property
    def merged(self) -> MergedConfig:
        """The merged settings, without those that are given to `fit`."""
        return self.layers.merged

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0, or the process that called `fit` on node 0."""
        return self.merged.config.node_rank == 0 if self.worker is None else self.worker.rank == 0

    @property
    def is_elastic(self) -> bool:
        """Return whether our launcher may change the number of workers during the run."""
        request = launched_by()
        return request is not None and request.is_elastic

    @property
    def may_leave(self) -> bool:
        """Return whether the run goes on without the node of this process after a SIGTERM."""
        request = launched_by()
        return request is not None and request.may_leave

    @property
    def full_size(self) -> int | None:
        """The number of workers when none is missing. None if the number of workers cannot change during the run."""
        request = launched_by()
        return request.world_size if request is not None and request.is_elastic else None

    @property
    def on_epoch(self) -> Callable[[Mapping[str, Any]], None] | None:
        """Function that is called with the metrics of each finished epoch in the process that called `fit`, or None.

        In a trial it is the function of the trial, otherwise that of the backend.
        """
        if not self.request.reports_epochs:
            return None
        trial = current()
        return trial.on_epoch if trial is not None else self.starting.on_epoch(self.merged.config)

    def merge_for_fit(self, settings: Mapping[str, Any]) -> MergedConfig:
        """Return the merged settings of a fit that was given `settings`, and create the directories of its loggers.

        Raises:
            ConfigError, ResourceError: if the settings contradict each other, or a logger cannot work with them.
        """
        merged = self.layers.merge(settings) if settings else self.merged
        loggers.check(merged)
        loggers.check_directories(merged)
        return merged


def make_setup(
    owner: str,
    pinned: str | None,
    job: Job,
    callbacks: list[Callback],
    config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    users_loggers: Sequence[Logger] = (),
) -> Setup:
    """Return the checked setup of a Trainer.

    Args:
        owner: name of the Trainer's class, for messages.
        pinned: backend that the class pins, or None.
        job, callbacks: what is trained.
        config, settings: the arguments of `Trainer`.
        users_loggers: the loggers that are objects.

    Raises:
        ConfigError, ResourceError: in the parent and in every worker, before any rank joins the others.
    """
    worker = worker_environment()  # None in a process that no launcher started
    received = handover()
    layers = read_layers(owner, pinned, config, settings, outside_settings(received), job)
    merged = layers.merged
    plan = _plan(merged, worker)
    _check_backend(merged, plan, layers.overrides.in_call)
    is_on_node_0 = worker.node_rank == 0 if worker is not None else merged.config.node_rank == 0
    if is_on_node_0 and not _has_begun(worker, received):  # only the main process reads the source, for all ranks
        _check_source(merged)
    _check_warmup(merged)
    check_named(merged, job)
    check_library("checkpoint_dir", merged.config.checkpoint_dir)
    loggers.check(merged)
    job.init_from = merged.config.init_from
    setup = Setup(job, callbacks, layers, plan, worker, received, FitRequest(), users_loggers)
    if worker is not None or any(merged.is_given(name) for name in ("nproc_per_node", "num_gpus", "gpus_per_node")):
        plan_batch(merged, setup.backend.data_parallel_size, full_size=setup.full_size)
    setup.check_job()
    return setup


def read_layers(
    owner: str,
    pinned: str | None,
    config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
    outside: Overrides,
    job: Job | None = None,
) -> SettingLayers:
    """Return the settings from all sources: the arguments of `make_setup`, and `outside`. Raises ConfigError if a name is wrong."""
    pinned, code, sweep, hyperparameters, notices = _settings(pinned, config, settings)
    if (trial := current()) is not None:
        sweep = joined(trial.settings, sweep)
    return SettingLayers(owner, pinned, code, sweep, hyperparameters, _overrides(config, outside, job), tuple(notices))


def _settings(
    pinned: str | None, config: Any, settings: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Return (pinned backend, settings in code, settings of a sweep, its other hyperparameters, notices)."""
    code: dict[str, Any] = {}
    sweep: dict[str, Any] = {}
    others: dict[str, Any] = {}
    notices: list[str] = []
    if isinstance(config, DistributedConfig):
        code = {name: value for name, value in config.given.items() if name not in config.of_arguments}
        notices = list(config.notices)
    elif isinstance(config, Mapping):
        sweep, others, notices = split_sweep(config)
    elif not isinstance(config, (str, os.PathLike, type(None))):
        raise ConfigError(
            f"config is a {type(config).__name__}: pass a DistributedConfig, the path of a file or a dict of settings"
        )
    direct, more_notices = canonical(_flat_options(pinned, settings), _own_options(pinned))
    code = joined(code, direct)
    if pinned is not None:
        pinned, option = pinned_backend(pinned, code)
        more_notices += [] if option is None else [f"{option} selects backend {pinned}"]
    return pinned, code, sweep, others, notices + more_notices


def _flat_options(pinned: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` with the options of a pinned backend, which may be given without its name, under full names."""
    if pinned is None:
        return dict(settings)
    group, options = backend_entry(pinned).group, _own_options(pinned)
    return {f"{group}.{name}" if name in options else name: value for name, value in settings.items()}


def _own_options(pinned: str | None) -> list[str]:
    """Return the names of the pinned backend's options."""
    return [] if pinned is None else list(backend_class(pinned).Options.__dataclass_fields__)


def _overrides(config: Any, outside: Overrides, job: Job | None) -> Overrides:
    """Return the settings from flags and files. Those from outside of the script override the file that the script names.

    The settings of TrainingArguments count as settings of a file that the script names.
    """
    if isinstance(config, DistributedConfig) and config.of_arguments:
        arguments = {name: value for name, value in config.given.items() if name in config.of_arguments}
        notices = [] if job is None else _drop_replaced(arguments, job)
        file = joined(arguments, outside.file)
        return dataclasses.replace(outside, file=file, notices=(*outside.notices, *notices))
    if not isinstance(config, (str, os.PathLike)):
        return outside
    read = read_config_file(config)
    file = joined(joined(read.file, read.flag), outside.file)
    return dataclasses.replace(outside, file=file, notices=(*outside.notices, *read.notices))


def _drop_replaced(arguments: dict[str, Any], job: Job) -> list[str]:
    """Remove the settings that an optimizer or a schedule of the script replaces, and return notices about them."""
    notices = []
    for what, given, name in (
        ("an optimizer", job.optimizer, "learning_rate"),
        ("a schedule", job.scheduler, "warmup_steps"),
    ):
        if given is not None and not job.names and arguments.pop(name, None) is not None:
            notices.append(f"{name} of TrainingArguments has no effect: the script passes {what}")
    return notices


def _plan(merged: MergedConfig, found: WorkerEnvironment | None) -> ProcessPlan:
    """Return the processes of a fit: those of the settings, or those that a launcher has started."""
    if found is None:
        return plan_of(merged.config)
    config, request = merged.config, launched_by()
    given = config.nproc_per_node or config.gpus_per_node
    least = config.min_nproc_per_node or given
    full_size = request.world_size if request is not None and request.is_elastic else found.world_size
    backend = choose_backend(config, full_size)
    # A backend that places workers itself may give the nodes different numbers of them.
    is_placed = request is not None and backend_entry(backend).places_workers
    running = found.world_size // config.num_nodes if is_placed else found.local_world_size
    is_fine = given is None or (least or 0) <= running <= given
    if not is_fine and merged.source("nproc_per_node") != "flag":
        name = "nproc_per_node" if config.nproc_per_node else "gpus_per_node"
        source = "config file" if merged.source(name) == "file" else "script"
        raise ConfigError(
            f"{name}={given} in the {source}, but the launcher has started {running} process{'es' * (running > 1)} per node before it"
            f" read the {source}: start with --nproc-per-node {given}, or drop it from the {source}"
        )
    if not (is_placed and config.num_nodes == 1):  # with num_nodes=1, the backend chooses the nodes
        _check_nodes(merged)
    wants_gpus = bool(config.num_gpus or config.gpus_per_node)
    is_cpu = config.num_gpus == 0 or (config.device == "cpu" and not wants_gpus)
    if request is not None and request.device == "cuda" and not is_cpu:
        _check_gpu(found)
    device = "cpu" if is_cpu else plan_processes(_local(config, found)).device
    if request is not None and is_placed and not request.is_elastic:
        return ProcessPlan(request.num_nodes, request.nproc_per_node, device, backend)
    if is_placed:
        return ProcessPlan(1, found.world_size, device, backend)
    return ProcessPlan(found.world_size // found.local_world_size, found.local_world_size, device, backend)


def _check_gpu(found: WorkerEnvironment) -> None:
    """Raise ResourceError if this worker was given a GPU and its machine has none, because the node claims GPUs that it lacks."""
    if not visible_gpus():
        raise ResourceError(
            f"rank {found.rank} on {socket.gethostname()} was started for a GPU, but no GPU can be seen there: correct the number"
            " of GPUs that this node claims to have, or set --device cpu"
        )


def _check_nodes(merged: MergedConfig) -> None:
    """Raise ConfigError if the script gives another number of nodes than our launcher was started with."""
    request, given = launched_by(), merged.config.num_nodes
    if request is not None and merged.is_given("num_nodes") and given != request.num_nodes:
        source = "config file" if merged.source("num_nodes") == "file" else "script"
        raise ConfigError(
            f"num_nodes={given} in the {source}, but this run was started with num_nodes={request.num_nodes}:"
            f" start with --num-nodes {given}, or drop it from the {source}"
        )


def _check_backend(merged: MergedConfig, plan: ProcessPlan, in_call: Sequence[str]) -> None:
    """Raise ConfigError for a flag that sets an option of a backend that is not used.

    From other sources, such as a call of `launch` with the options `in_call`, such an option has no effect.
    """
    used = (*groups_in_use(merged.config, plan.backend), "data")
    for name, source in merged.sources.items():
        group, _, option = name.partition(".")
        if option and group not in used and source == "flag" and name not in in_call:
            raise ConfigError(
                f"{name} is an option of another backend than {plan.backend!r}: drop it, or set --backend"
            )


def _has_begun(worker: WorkerEnvironment | None, received: Handover | None) -> bool:
    """Return whether the run has begun. It then continues from its own checkpoints."""
    return (received is not None and received.resume) or (worker is not None and worker.restart_count > 0)


def _check_source(merged: MergedConfig) -> None:
    """Raise an error if the checkpoint of `resume_from_checkpoint` or the weights of `init_from` are missing."""
    source, weights = merged.config.resume_from_checkpoint, merged.config.init_from
    if isinstance(source, str):
        from distributed.checkpoints.manifest import check_source

        check_source(source)
    elif weights is not None and not source:  # a run that resumes does not need them
        from distributed.checkpoints.weights import check_weights

        check_weights("init_from", weights)


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
            f"num_gpus={config.num_gpus} in the script, but this run has {found.world_size} processes:"
            f" start with --num-gpus {config.num_gpus}, or drop it from the script"
        )
    gpus = found.local_world_size if config.num_gpus or config.gpus_per_node else None
    return DistributedConfig(
        device=config.device, nproc_per_node=found.local_world_size, gpus_per_node=gpus, backend=config.backend,
        communication_backend=config.communication_backend,
    )  # fmt: skip
