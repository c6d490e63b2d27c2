"""Whom this process works with, for scripts that do not use `Trainer`: joining, leaving, and who is who.

A worker of ours, of torchrun, Slurm or mpirun finds its place in the environment; a process without a launcher is a world of
one. Importing this loads no framework.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from distributed.backends.adoption import adopted
from distributed.config.gpus import visible_gpus
from distributed.config.merging import merge
from distributed.config.plan import ProcessPlan, choose_backend, plan_processes
from distributed.config.registry import REGISTRY, TRANSPORTS, starting_of
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.request import typed_for_script

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld
    from distributed.comm.parallel import DistributedDataParallel

_CALL = "init_process_group()"
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _ThisProcess:
    world: TorchWorld | None = None
    transport: str | None = None  # what init_process_group() was asked for
    wrappers: weakref.WeakSet[DistributedDataParallel] = dataclasses.field(default_factory=weakref.WeakSet)
    is_ending: bool = False  # destroy_process_group is called at exit


_this = _ThisProcess()


# Joining and leaving


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Join the other ranks. All ranks call it, once; in a process without a launcher it makes a world of one.

    Args:
        backend: the transport, "nccl", "gloo" or "mpi"; None means nccl on GPUs, else gloo. What was typed for the launcher
            (`--backend`) is stronger.
        init_method: "env://" or None. Ranks find each other as the launcher says, else by MASTER_ADDR and MASTER_PORT.
        world_size, rank: only where no launcher says them; elsewhere they must agree with it.
        timeout_s: seconds a collective may wait for the others; None means 300.

    Raises ConfigError for arguments that are wrong or contradict the launcher, ResourceError where GPUs are missing or with
    the ranks that did not come in time.
    """
    if init_method not in (None, "env://"):
        raise ConfigError(
            f"init_method={init_method!r} is not used: set MASTER_ADDR and MASTER_PORT, or start with a launcher"
        )
    found = _place(world_size, rank)
    code = {"communication_backend": _transport(backend), "timeout_s": timeout_s}
    typed = typed_for_script("backend", "communication_backend", "device", "timeout_s", "start_timeout")
    config = merge(typed, {name: value for name, value in code.items() if value is not None}).config
    if is_initialized():
        world = _joined()
        joined = world.transport if world is not None else None  # a world of one has no transport to differ in
        if joined is not None and config.communication_backend not in (None, joined):
            raise ConfigError(
                f"backend={config.communication_backend!r}, but this process joined with {joined!r}: call"
                " destroy_process_group() first"
            )
        return
    if backend not in (None, config.communication_backend) and (found is None or found.rank == 0):
        _log.warning("backend=%r gives way to the launcher's %r", backend, config.communication_backend)
    _this.world, _this.transport = _join(config, found), config.communication_backend


def _join(config: DistributedConfig, found: WorkerEnvironment | None) -> TorchWorld:
    from distributed.backends._torch.world import OneProcess

    plan = _plan(config, found)
    if found is None or found.world_size == 1:
        return OneProcess(plan)
    starting = starting_of(choose_backend(config, found.world_size))
    world: TorchWorld = starting.join(plan, config, _log.warning, found, _CALL)
    _end_in_order()
    return world


def _place(world_size: int | None, rank: int | None) -> WorkerEnvironment | None:
    """What this process is as a worker: as its launcher says, else as the arguments say."""
    found = worker_environment()
    if found is not None:
        for name, value in (("world_size", world_size), ("rank", rank)):
            if value not in (None, getattr(found, name)):
                raise ConfigError(f"{name}={value}, but the launcher says {getattr(found, name)}: drop {name}")
        return found
    if world_size in (None, 1) and rank in (None, 0):
        return None
    addr, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world_size is None or rank is None or not addr or not port.isdigit():
        raise ConfigError(
            f"world_size={world_size} and rank={rank} without a launcher need each other, MASTER_ADDR and MASTER_PORT: start"
            " with 'python -m distributed.launcher SCRIPT --nproc_per_node N' and drop them"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not below world_size={world_size}: number processes from 0")
    return WorkerEnvironment(rank, rank, world_size, world_size, 0, addr, int(port), 0, "arguments")


def _transport(backend: str | None) -> str | None:
    if backend is None or backend in TRANSPORTS:
        return backend
    why = "trains a model" if backend in REGISTRY else "is not one"
    raise ConfigError(
        f"backend={backend!r}: here it is the transport, and {backend!r} {why}: use {' or '.join(TRANSPORTS)}"
    )


def _plan(config: DistributedConfig, found: WorkerEnvironment | None) -> ProcessPlan:
    transport, device = config.communication_backend, config.device
    if transport == "nccl" and device != "cpu" and visible_gpus() == 0:
        raise ConfigError("backend='nccl' needs GPUs, and this machine shows none: use backend='gloo'")
    if device is None and transport in ("gloo", "mpi"):
        device = "cpu"
    local = found.local_world_size if found is not None else 1
    asked = DistributedConfig(device=device, nproc_per_node=local, communication_backend=transport)
    nodes = found.world_size // local if found is not None else 1
    return ProcessPlan(nodes, local, plan_processes(asked).device, "torch.distributed")


def _end_in_order() -> None:
    """A script that forgets to leave, leaves at its end; torch's own end can abort."""
    import atexit

    if not _this.is_ending:
        atexit.register(destroy_process_group)
        _this.is_ending = True


def destroy_process_group() -> None:
    """Leave the others; nobody waits. Models stay usable in this process alone. Nothing happens where nobody joined."""
    for wrapper in list(_this.wrappers):
        wrapper.release()
    world = _joined()
    _this.world = _this.transport = None
    if world is not None:
        world.end()


def is_initialized() -> bool:
    """Whether this process joined: here, in a Trainer, or by torch's own call."""
    return _joined() is not None


# Who is who


def get_rank() -> int:
    """This process' rank, from 0: of the group, or before joining as the launcher says it. No collective."""
    return _numbers(_joined())["rank"]


def get_world_size() -> int:
    """Processes in all: of the group, or before joining as the launcher says. 1 without a launcher. No collective."""
    return _numbers(_joined())["world_size"]


def get_distributed_info() -> dict[str, Any]:
    """What this process is among the others. No collective.

    Returns `available` (whether there are other processes), `initialized`, `world_size`, `rank`, `local_rank`,
    `local_world_size`, `node_rank`, `backend` (the transport: nccl, gloo or mpi; before joining and in a world of one the
    one that several processes would use) and `device` (None before joining).
    """
    world = _joined()
    numbers = _numbers(world)
    device = world.context.device if world is not None else None
    backend = world.transport if world is not None else None
    return {
        "available": numbers["world_size"] > 1, "initialized": world is not None, **numbers,
        "backend": backend or _usual_transport(device), "device": device,
    }  # fmt: skip


def _numbers(world: TorchWorld | None) -> dict[str, int]:
    names = ("world_size", "rank", "local_rank", "local_world_size", "node_rank")
    place: Any = world.context if world is not None else worker_environment()
    values = (1, 0, 0, 1, 0) if place is None else [getattr(place, name) for name in names]
    return dict(zip(names, values, strict=True))


def _usual_transport(device: str | None) -> str:
    """What a group would use: as asked for here or typed for the launcher, else by the device."""
    config = merge(typed_for_script("communication_backend", "device"), {}).config
    if asked := _this.transport or config.communication_backend:
        return asked
    device = device or config.device or ("cuda" if visible_gpus() else "cpu")
    return "nccl" if device.startswith("cuda") else "gloo"


def wrappers() -> weakref.WeakSet[DistributedDataParallel]:
    """The wrapped models of this process: they let go of the group when it ends."""
    return _this.wrappers


def _joined() -> TorchWorld | None:
    """The world that this process joined, or None. A group that somebody else made is taken up."""
    world = _this.world
    if world is not None and not world.is_alive():
        world = None  # somebody else ended the group
    if world is None or world.context.world_size == 1:
        world = adopted(_log.warning) or world
    _this.world = world
    return world


def current_world() -> TorchWorld:
    """The world to talk to. A process without a launcher need not join. Raises ConfigError in a worker that did not."""
    world = _joined()
    if world is not None:
        return world
    if get_world_size() > 1:
        raise ConfigError(
            f"rank {get_rank()} of {get_world_size()} has not joined the others: call {_CALL} first, on every rank"
        )
    from distributed.backends._torch.world import OneProcess

    return OneProcess(ProcessPlan(1, 1, "cpu", "torch.distributed"))
