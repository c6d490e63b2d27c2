"""Join and leave a process group, and look up ranks, for scripts without `Trainer`.

A worker of our launcher, torchrun, Slurm or mpirun finds its rank in the environment. A process without a launcher is a
world of one rank. Importing this module loads no framework.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

from distributed.backends import starting_of
from distributed.backends.adoption import adopted
from distributed.config.gpus import visible_gpus
from distributed.config.merging import merge
from distributed.config.plan import ProcessPlan, choose_backend, plan_processes
from distributed.config.registry import REGISTRY, TRANSPORTS
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.launching.request import overrides_for_script

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld
    from distributed.comm.parallel import DistributedDataParallel

_CALL = "init_process_group()"
_log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Membership:
    world: TorchWorld | None = None
    transport: str | None = None  # the transport passed to init_process_group()
    wrappers: weakref.WeakSet[DistributedDataParallel] = dataclasses.field(default_factory=weakref.WeakSet)
    is_ending: bool = False  # destroy_process_group is registered to run at exit


_membership = _Membership()


# Join and leave


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout_s: float | None = None,
) -> None:
    """Join the other ranks. Every rank must call it; a second call does nothing.

    Without a launcher the world has one rank.

    Args:
        backend: the transport: "nccl", "gloo" or "mpi". None means nccl on GPUs, else gloo. The launcher's `--backend`
            takes precedence.
        init_method: "env://" or None. Ranks find each other through the launcher, or through MASTER_ADDR and
            MASTER_PORT.
        world_size: the number of processes, needed only without a launcher. With one it must agree with the launcher.
        rank: the rank of this process, from 0. Like `world_size`, it is needed only without a launcher.
        timeout_s: the number of seconds that a collective may wait for other ranks. None means 300.

    Raises:
        ConfigError: an argument is wrong or contradicts the launcher, or this process joined with another transport.
        ResourceError: GPUs are missing, or some ranks did not join in time. The message names these ranks.
    """
    if init_method not in (None, "env://"):
        raise ConfigError(
            f"init_method={init_method!r} is not used: set MASTER_ADDR and MASTER_PORT, or start with a launcher"
        )
    found = _own_environment(world_size, rank)
    code = {"communication_backend": _transport(backend), "timeout_s": timeout_s}
    overrides = overrides_for_script("backend", "communication_backend", "device", "timeout_s", "start_timeout")
    config = merge(overrides, {name: value for name, value in code.items() if value is not None}).config
    if is_initialized():
        world = _joined()
        joined = world.transport if world is not None else None  # a world of one has no transport
        if joined is not None and config.communication_backend not in (None, joined):
            raise ConfigError(
                f"backend={config.communication_backend!r}, but this process joined with {joined!r}: call"
                " destroy_process_group() first"
            )
        return
    if backend not in (None, config.communication_backend) and (found is None or found.rank == 0):
        _log.warning("backend=%r is replaced by the launcher's %r", backend, config.communication_backend)
    _membership.world, _membership.transport = _join(config, found), config.communication_backend


def _join(config: DistributedConfig, found: WorkerEnvironment | None) -> TorchWorld:
    from distributed.backends._torch.world import OneTorchProcess

    plan = _plan(config, found)
    if found is None or found.world_size == 1:
        return OneTorchProcess(plan)
    starting = starting_of(choose_backend(config, found.world_size))
    world: TorchWorld = starting.join(plan, config, _log.warning, found, _CALL)
    _end_in_order()
    return world


def _own_environment(world_size: int | None, rank: int | None) -> WorkerEnvironment | None:
    """Return the environment of this process, from the launcher or the arguments. None for a process on its own."""
    found = worker_environment()
    if found is not None:
        for name, value in (("world_size", world_size), ("rank", rank)):
            if value not in (None, getattr(found, name)):
                raise ConfigError(f"{name}={value}, but the launcher set {getattr(found, name)}: drop {name}")
        return found
    if world_size in (None, 1) and rank in (None, 0):
        return None
    addr, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world_size is None or rank is None or not addr or not port.isdigit():
        raise ConfigError(
            f"world_size={world_size} and rank={rank}: without a launcher, set both, and MASTER_ADDR and MASTER_PORT too; or start with"
            " 'python -m distributed.launcher SCRIPT --nproc_per_node N', and drop world_size and rank"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not below world_size={world_size}: number processes from 0")
    return WorkerEnvironment(rank, rank, world_size, world_size, 0, addr, int(port), 0, "arguments")


def _transport(backend: str | None) -> str | None:
    if backend is None or backend in TRANSPORTS:
        return backend
    why = "trains a model and is not a transport" if backend in REGISTRY else "is not a transport"
    raise ConfigError(f"backend={backend!r} {why}: use {' or '.join(TRANSPORTS)}")


def _plan(config: DistributedConfig, found: WorkerEnvironment | None) -> ProcessPlan:
    transport, device = config.communication_backend, config.device
    if transport == "nccl" and device != "cpu" and visible_gpus() == 0:
        raise ConfigError("backend='nccl' needs GPUs, but this machine shows none: use backend='gloo'")
    if device is None and transport in ("gloo", "mpi"):
        device = "cpu"
    local = found.local_world_size if found is not None else 1
    wanted = DistributedConfig(device=device, nproc_per_node=local, communication_backend=transport)
    nodes = found.world_size // local if found is not None else 1
    return ProcessPlan(nodes, local, plan_processes(wanted).device, "torch.distributed")


def _end_in_order() -> None:
    """Leave the process group at exit if the script does not.

    Workaround (torch 2.13, pytorch/pytorch#179291, which was not merged; may go when torch leaves the group itself):
    torch with gloo can abort at exit if its process group still exists.
    """
    import atexit

    if not _membership.is_ending:
        atexit.register(destroy_process_group)
        _membership.is_ending = True


def destroy_process_group() -> None:
    """Leave the process group, without waiting for other ranks. Does nothing if this process did not join.

    Wrapped models stay usable in this process alone.
    """
    for wrapper in list(_membership.wrappers):
        wrapper.release()
    world = _joined()
    _membership.world = _membership.transport = None
    if world is not None:
        world.end()


def is_initialized() -> bool:
    """Return whether this process joined a process group: through this module, a Trainer, or torch itself."""
    return _joined() is not None


# Ranks


def get_rank() -> int:
    """Return the rank of this process, from 0. Before joining it is the rank that the launcher gave. Not a
    collective."""
    return _numbers(_joined())["rank"]


def get_world_size() -> int:
    """Return the number of processes. Not a collective.

    Before joining it is the number that the launcher gave, or 1 without a launcher.
    """
    return _numbers(_joined())["world_size"]


def get_distributed_info() -> dict[str, Any]:
    """Return the rank of this process and facts about its process group. Not a collective.

    Returns:
        A dict with `available` (whether there are other processes), `initialized`, `world_size`, `rank`, `local_rank`,
        `local_world_size`, `node_rank`, `backend` (the transport: nccl, gloo or mpi; before joining and in a world of
        one the transport that several processes would use) and `device` (None before joining).
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
    ranks: Any = world.context if world is not None else worker_environment()
    values = (1, 0, 0, 1, 0) if ranks is None else [getattr(ranks, name) for name in names]
    return dict(zip(names, values, strict=True))


def _usual_transport(device: str | None) -> str:
    """Return the transport that a process group would use: the one requested here or in the launcher, or else that of the
    device."""
    config = merge(overrides_for_script("communication_backend", "device"), {}).config
    if given := _membership.transport or config.communication_backend:
        return given
    device = device or config.device or ("cuda" if visible_gpus() else "cpu")
    return "nccl" if device.startswith("cuda") else "gloo"


def wrappers() -> weakref.WeakSet[DistributedDataParallel]:
    """Return the wrapped models of this process, which drop torch's wrapper when the process group ends."""
    return _membership.wrappers


def _joined() -> TorchWorld | None:
    """Return the world that this process joined, or None. A process group that other code initialized is adopted."""
    world = _membership.world
    if world is not None and not world.is_alive():
        world = None  # other code destroyed the process group
    if world is None or world.context.world_size == 1:
        world = adopted(_log.warning) or world
    _membership.world = world
    return world


def current_world() -> TorchWorld:
    """Return the world of this process. A process without a launcher need not join.

    Raises ConfigError in a worker that has not joined.
    """
    world = _joined()
    if world is not None:
        return world
    if get_world_size() > 1:
        raise ConfigError(
            f"rank {get_rank()} of {get_world_size()} has not joined the others: call {_CALL} first, on every rank"
        )
    from distributed.backends._torch.world import OneTorchProcess

    return OneTorchProcess(ProcessPlan(1, 1, "cpu", "torch.distributed"))
