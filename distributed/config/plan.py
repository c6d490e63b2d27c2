"""The arithmetic of a run: the number of processes, their devices, and how a global batch is split."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

from distributed.config.gpus import visible_gpus
from distributed.config.merging import MergedConfig
from distributed.config.registry import (
    backend_entry,
    cpus_only_reason,
    default_backend,
    fixed_size_reason,
    one_process_reason,
    require_installed,
)
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, ResourceError

DATA = "data"  # the axis along which processes get different samples


@dataclasses.dataclass(frozen=True)
class ProcessPlan:
    """The processes of a run, and the axes along which they share the work.

    `world_size = num_nodes x nproc_per_node` is the product of the sizes of all axes.

    Attributes:
        num_nodes: the number of nodes.
        nproc_per_node: the number of processes of each node.
        device: "cpu" or "cuda".
        backend: the name of the backend.
        axes: name -> size, the outermost axis first. If empty, every process is a replica and gets different samples.

    Raises:
        ConfigError: the sizes of the axes do not multiply to the number of processes.
    """

    num_nodes: int
    nproc_per_node: int
    device: str
    backend: str
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.axes:
            object.__setattr__(self, "axes", {DATA: self.world_size})
        product = math.prod(self.axes.values())
        if product != self.world_size:
            sizes = " x ".join(f"{name} {size}" for name, size in self.axes.items())
            raise ConfigError(f"{sizes} = {product} processes, but the run has {self.world_size}: make them agree")

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self.num_nodes * self.nproc_per_node

    @property
    def data_parallel_size(self) -> int:
        """The number of processes that get different samples: the size of the data axis, 1 without one."""
        return self.axes.get(DATA, 1)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The batch equation: `global_batch_size = batch_size x gradient_accumulation_steps x data_parallel_size`.

    All sizes are in samples. If `global_batch_size` is not divisible, it is cut into slices that differ by at most one
    sample, and `batch_size` is the largest slice.

    Attributes:
        batch_size: the samples of one micro-batch in one process.
        gradient_accumulation_steps: the micro-batches of one update.
        data_parallel_size: the processes that get different samples.
        global_batch_size: the samples of one update, over all processes.
        full_batch_size: the `batch_size` of the settings, by which `lr_scaling` scales the rates, if that of this plan is smaller
            because the run has fewer processes or ran out of memory. Otherwise 0.
        max_samples: the number of the first samples of a validation set that a validation reads. 0 means all.
        max_batches: the same for the items of a batch sampler, each of which is a global batch.
    """

    batch_size: int
    gradient_accumulation_steps: int
    data_parallel_size: int
    global_batch_size: int
    full_batch_size: int = 0
    max_samples: int = 0
    max_batches: int = 0

    @property
    def lr_ratio(self) -> float:
        """The global batch size divided by the batch size, for `lr_scaling`."""
        return self.global_batch_size / (self.full_batch_size or self.batch_size)

    def with_fewer(self, data_parallel_size: int) -> BatchPlan:
        """Return the plan of the same global batch for fewer processes. No micro-batch becomes larger."""
        steps = -(-self.global_batch_size // (self.batch_size * data_parallel_size))
        batch_size = -(-self.global_batch_size // (steps * data_parallel_size))
        return BatchPlan(batch_size, steps, data_parallel_size, self.global_batch_size, self.batch_size)

    def halved(self) -> BatchPlan:
        """Return the plan of the same global batch with twice as many micro-batches."""
        steps = 2 * self.gradient_accumulation_steps
        batch_size = -(-self.global_batch_size // (steps * self.data_parallel_size))
        full = self.full_batch_size or self.batch_size
        return dataclasses.replace(self, batch_size=batch_size, gradient_accumulation_steps=steps, full_batch_size=full)

    def halved_already(self, times: int) -> BatchPlan:
        """Return this plan, which has been halved `times` times, with its batch size before that as `full_batch_size`."""
        if not times or self.full_batch_size:
            return self
        steps = max(1, self.gradient_accumulation_steps >> times)
        full = -(-self.global_batch_size // (steps * self.data_parallel_size))
        return dataclasses.replace(self, full_batch_size=full)

    def __str__(self) -> str:
        product = self.batch_size * self.gradient_accumulation_steps * self.data_parallel_size
        sign = "=" if product == self.global_batch_size else "<="
        return (
            f"global_batch_size {self.global_batch_size} {sign} batch_size {self.batch_size}"
            f" x gradient_accumulation_steps {self.gradient_accumulation_steps}"
            f" x data_parallel_size {self.data_parallel_size}"
        )


def starting_line(plan: ProcessPlan, *, is_chosen: bool = True, is_elastic: bool = False) -> str:
    """Return the line that announces the workers, and what takes long in their start.

    Args:
        plan: the processes of the run.
        is_chosen: False if no backend was chosen outside the script. The line then names no backend, because the script
            may choose one.
        is_elastic: True if the run may go on with fewer processes. A backend that places the workers then starts what fits.
    """
    is_placed = backend_entry(plan.backend).places_workers
    count = plan.world_size if is_placed else plan.nproc_per_node
    workers = f"starting {'up to ' * (is_placed and is_elastic)}{count} worker{'s' * (count > 1)}"
    if not is_chosen:
        return f"{workers} ({plan.device})"
    slow_start = backend_entry(plan.backend).slow_start
    return f"{workers} ({plan.backend}, {plan.device})" + (f": {slow_start}" if slow_start else "")


def plan_processes(config: DistributedConfig, count_gpus: Callable[[], int] | None = None) -> ProcessPlan:
    """Return the processes, device and backend for the resource settings.

    Contradictions between settings are checked before the GPUs of this machine are counted.

    Args:
        config: the settings.
        count_gpus: returns the number of GPUs of this machine; by default `visible_gpus`.

    Raises:
        ConfigError: the numbers contradict each other, or the backend cannot run so many processes.
        ResourceError: this machine has too few GPUs, or the backend is not installed.
    """
    nodes, device = config.num_nodes, _given_device(config)
    if config.is_elastic and (why := fixed_size_reason(config.backend or default_backend(2))):
        raise ConfigError(f"the number of processes cannot change with backend={config.backend!r}: {why}")
    per_node, gpus = config.nproc_per_node, config.gpus_per_node
    if gpus == 0 and config.num_gpus:
        raise ConfigError(f"num_gpus={config.num_gpus} contradicts gpus_per_node=0: drop one of them")
    if gpus and per_node is not None and per_node != gpus:
        raise ConfigError(
            f"nproc_per_node={per_node} is not gpus_per_node={gpus}: one process drives one GPU, set one of them"
        )
    if config.num_gpus:
        each = gpus or per_node
        if each is not None and config.num_gpus != nodes * each:
            word = "gpus_per_node" if gpus else "nproc_per_node"
            raise ConfigError(
                f"num_gpus={config.num_gpus} is not num_nodes={nodes} x {word}={each}: set num_gpus={nodes * each} or drop it"
            )
        if config.num_gpus % nodes:
            raise ConfigError(
                f"num_gpus={config.num_gpus} is not divisible by num_nodes={nodes}: set a multiple of {nodes}"
            )
        gpus = config.num_gpus // nodes
    if gpus and device == "cpu":
        raise ConfigError(
            f"device='cpu' contradicts {gpus} GPUs per node: drop one of them, or use nproc_per_node={gpus} for CPU processes"
        )
    visible = -1
    if gpus or device == "cuda" or (device is None and config.num_gpus is None and gpus is None):
        visible = (count_gpus or visible_gpus)()
    wants_gpu = bool(gpus) or device == "cuda"
    wanted = 1 if not gpus and _may_share(config) else gpus or per_node or 1
    if wants_gpu and visible < wanted:
        have = "no GPU" if visible == 0 else f"{visible} GPU{'s' * (visible > 1)}"
        raise ResourceError(
            f"{wanted} GPU{'s' * (wanted > 1)} per node requested, but this machine shows {have}:"
            f" use {_flags_for_cpus(config, wanted)} for CPU processes with gloo"
        )
    if wants_gpu:
        device, processes = "cuda", gpus or per_node or visible
    elif visible > 0:
        device, processes = "cuda", per_node or visible
        if processes > visible:
            raise ResourceError(
                f"nproc_per_node={processes} needs {processes} GPUs, but this machine shows {visible}: add --device cpu for CPU processes,"
                " or --device cuda --communication-backend gloo for processes that share a GPU"
            )
    else:
        device, processes = "cpu", per_node or 1
    return ProcessPlan(nodes, processes, device, choose_backend(config, nodes * processes))


def check_nodes(merged: MergedConfig, plan: ProcessPlan) -> None:
    """Raise ConfigError if several nodes have no address of node 0, or if a lost node could not be replaced (`max_restarts=0`)."""
    is_for_us = plan.num_nodes > 1 and not backend_entry(plan.backend).places_workers
    if is_for_us and not merged.is_given("master_addr"):
        raise ConfigError(
            f"num_nodes={plan.num_nodes} needs the address of node 0 on every node: set master_addr (--master-addr HOST)"
        )
    if is_for_us and (found := re.fullmatch(r"([^\[\]:]+):(\d+)", merged.config.master_addr)):
        raise ConfigError(f"master_addr={found[0]!r} has a port: set master_addr={found[1]} and master_port={found[2]}")
    if merged.config.min_nodes not in (None, plan.num_nodes) and not merged.config.max_restarts:
        raise ConfigError(
            "max_restarts=0 ends the run when a node is lost: set max_restarts=1 or more, or a fixed num_nodes"
        )


def _given_device(config: DistributedConfig) -> str | None:
    """Return the device that the settings or the backend give, or None if the machine decides.

    Raises ConfigError if the settings give GPUs to a backend that trains on CPUs only.
    """
    if config.backend is None or not backend_entry(config.backend).cpus_only:
        return config.device
    for name in ("device", "num_gpus", "gpus_per_node"):
        value = getattr(config, name)
        if value not in (None, "cpu", 0):
            raise ConfigError(f"{name}={value!r} does not work with backend={config.backend!r}: {cpus_only_reason()}")
    return "cpu"


def _may_share(config: DistributedConfig) -> bool:
    """Return whether several processes may train on one GPU.

    NCCL refuses to share a GPU, so `communication_backend="gloo"` and `device="cuda"` must be set explicitly.
    """
    entry = backend_entry(config.backend or default_backend(2))
    return entry.shares_gpus and config.device == "cuda" and config.communication_backend == "gloo"


def _flags_for_cpus(config: DistributedConfig, processes: int) -> str:
    """Return the flags for `processes` CPU processes per node. They also override GPU settings in the script."""
    flags = ["--device cpu"] if config.device == "cuda" else []
    flags += [f"--{name.replace('_', '-')} 0" for name in ("num_gpus", "gpus_per_node") if getattr(config, name)]
    if config.nproc_per_node is None and processes > 1:
        flags.append(f"--nproc-per-node {processes}")
    return " ".join(flags)


def choose_backend(config: DistributedConfig, world_size: int) -> str:
    """Return the backend for `world_size` processes.

    Raises ConfigError if the chosen backend cannot run that many processes, and ResourceError if it is not installed.
    """
    backend = config.backend or default_backend(world_size)
    if config.backend is not None:
        require_installed(backend_entry(backend))
    if backend_entry(backend).single_process and world_size > 1:
        raise ConfigError(f"backend={backend!r} does not work with {world_size} processes: {one_process_reason()}")
    return backend


def mixed_precision(config: DistributedConfig, device: str) -> str:
    """Return "no", "fp16" or "bf16": the meaning of `mixed_precision` on `device`.

    Raises ConfigError if it contradicts `dtype`.
    """
    meant = str(config.mixed_precision)
    if isinstance(config.mixed_precision, bool):
        usual = "fp16" if device == "cuda" else "bf16"
        meant = usual if config.mixed_precision else "no"
    if meant != "no" and config.dtype == "float64":
        raise ConfigError(f"mixed_precision={meant!r} contradicts dtype='float64': set mixed_precision='no'")
    return meant


def plan_batch(
    merged: MergedConfig, data_parallel_size: int, loader_batch_size: int | None = None, *, full_size: int | None = None
) -> BatchPlan:
    """Solve the batch equation.

    A loader's own batch size counts as set in code: it overrides a value in a file, and is overridden by a flag, a sweep
    value or a `global_batch_size`. A different `batch_size` that was given to Trainer is an error.

    Args:
        merged: the settings with their sources.
        data_parallel_size: the number of processes that get different samples.
        loader_batch_size: the batch size of the training loader in samples. None if it has none, or DataLoader's
            default of 1.
        full_size: the number of processes when none is missing, which sets the global batch. None if none is missing.

    Raises:
        ConfigError: the given values do not agree. The message has the numbers.
    """
    if full_size is not None and full_size != data_parallel_size:
        return plan_batch(merged, full_size, loader_batch_size).with_fewer(data_parallel_size)
    config, n = merged.config, data_parallel_size
    batch = config.batch_size if merged.is_given("batch_size") else None
    total = config.global_batch_size
    steps = config.gradient_accumulation_steps if merged.is_given("gradient_accumulation_steps") else None
    if loader_batch_size is not None:
        if merged.source("batch_size") == "code" and batch != loader_batch_size:
            raise ConfigError(
                f"batch_size={batch} in code is not the loader's batch_size={loader_batch_size}: drop one of them"
            )
        if total is None and merged.source("batch_size") not in ("sweep", "flag"):
            batch = loader_batch_size
    if total is None:
        batch, steps = batch or config.batch_size, steps or 1
        return BatchPlan(batch, steps, n, batch * steps * n)
    if batch is not None and steps is not None and batch != -(-total // (steps * n)):  # `batch` is the largest slice
        raise ConfigError(
            f"global_batch_size={total} is not batch_size={batch} x gradient_accumulation_steps={steps}"
            f" x data_parallel_size={n} = {batch * steps * n}: drop one of the three"
        )
    if batch is not None and steps is None:
        if total % (batch * n):
            raise ConfigError(
                f"global_batch_size={total} is not a multiple of batch_size={batch} x data_parallel_size={n} = {batch * n}:"
                f" set global_batch_size={-(-total // (batch * n)) * batch * n} or drop batch_size"
            )
        steps = total // (batch * n)
    steps = steps or 1
    return BatchPlan(-(-total // (steps * n)), steps, n, total)


def in_effect(merged: MergedConfig, batch: BatchPlan, loader_batch_size: int | None = None) -> MergedConfig:
    """Return `merged` with the batch sizes that the run uses, for its config.yaml."""
    sources = dict(merged.sources)
    for name in ("batch_size", "gradient_accumulation_steps", "global_batch_size"):
        if getattr(batch, name) != getattr(merged.config, name):
            sources[name] = "derived"
    if batch.batch_size == loader_batch_size and merged.source("batch_size") in ("default", "file"):
        sources["batch_size"] = "loader"
    numbers = {name: value for name, value in dataclasses.asdict(batch).items() if name in sources}
    return dataclasses.replace(merged, config=dataclasses.replace(merged.config, **numbers), sources=sources)
