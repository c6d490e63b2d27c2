"""Communication for scripts that do not use `Trainer`: the same calls in one process and in many.

A worker of ours, of torchrun, Slurm or mpirun finds its place in the environment; a process without a launcher is a world of
one, where every call is defined and costs nothing. Importing this loads no framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import sys
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributed.backends import REGISTRY
from distributed.config import DistributedConfig
from distributed.errors import ConfigError
from distributed.gpus import visible_gpus
from distributed.launcher import WorkerEnvironment, typed_for_script, worker_environment
from distributed.plan import ProcessPlan, plan_processes
from distributed.settings import merge

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.parallel import DistributedDataParallel
    from distributed.backends._torch.world import World

__all__ = [
    "ReduceOp", "all_gather", "all_reduce", "barrier", "broadcast", "destroy_process_group", "get_distributed_info",
    "get_rank", "get_world_size", "init_process_group", "is_initialized", "no_sync", "reduce_scatter",
]  # fmt: skip

_TRANSPORTS = ("nccl", "gloo", "mpi")
_CALL = "init_process_group()"
_MAX_DIMENSIONS = 14
_log = logging.getLogger(__name__)


class ReduceOp(enum.Enum):
    """How values of all ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


@dataclasses.dataclass
class _ThisProcess:
    world: World | None = None
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
    typed = typed_for_script("communication_backend", "device", "timeout_s", "start_timeout")
    config = merge(typed, {name: value for name, value in code.items() if value is not None}).config
    if is_initialized():
        if config.communication_backend not in (None, get_distributed_info()["backend"]):
            raise ConfigError(
                f"backend={config.communication_backend!r}, but this process joined with"
                f" {get_distributed_info()['backend']!r}: call destroy_process_group() first"
            )
        return
    if backend not in (None, config.communication_backend) and (found is None or found.rank == 0):
        _log.warning("backend=%r gives way to the launcher's %r", backend, config.communication_backend)
    _this.world = _join(config, found)


def _join(config: DistributedConfig, found: WorkerEnvironment | None) -> World:
    from distributed.backends._torch.world import OneProcess, ProcessGroup

    plan = _plan(config, found)
    if found is None or found.world_size == 1:
        return OneProcess(plan)
    world = ProcessGroup(plan, config, _log.warning, found=found, call=_CALL)
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
    if backend is None or backend in _TRANSPORTS:
        return backend
    why = "trains a model" if backend in REGISTRY else "is not one"
    raise ConfigError(
        f"backend={backend!r}: here it is the transport, and {backend!r} {why}: use {' or '.join(_TRANSPORTS)}"
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
    _this.world = None
    if _is_torch_joined():
        from distributed.backends._torch.world import leave_group

        leave_group()


def is_initialized() -> bool:
    """Whether this process joined: here, in a Trainer, or by torch's own call."""
    return _joined() is not None


# Who is who


def get_rank() -> int:
    """This process' rank, from 0: of the group, or before joining as the launcher says it. No collective."""
    return int(get_distributed_info()["rank"])


def get_world_size() -> int:
    """Processes in all: of the group, or before joining as the launcher says. 1 without a launcher. No collective."""
    return int(get_distributed_info()["world_size"])


def get_distributed_info() -> dict[str, Any]:
    """What this process is among the others. No collective.

    Returns `available` (whether there are other processes), `initialized`, `world_size`, `rank`, `local_rank`,
    `local_world_size`, `node_rank`, `backend` (the transport; None in a world of one and before joining) and `device`
    (None before joining).
    """
    world = _joined()
    names = ("world_size", "rank", "local_rank", "local_world_size", "node_rank")
    place: Any = world.context if world is not None else worker_environment()
    numbers = (1, 0, 0, 1, 0) if place is None else [getattr(place, name) for name in names]
    info: dict[str, Any] = dict(zip(names, numbers, strict=True))
    backend = None
    if world is not None and _is_torch_joined():
        import torch.distributed as dist

        backend = dist.get_backend()
    device = world.context.device if world is not None else None
    is_many = info["world_size"] > 1
    return {"available": is_many, "initialized": world is not None, **info, "backend": backend, "device": device}


def _is_torch_joined() -> bool:
    """Whether torch's default group exists; torch is not imported to find out."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def _joined() -> World | None:
    """The world that this process joined, or None. A group that somebody else made is taken up."""
    is_torch_joined = _is_torch_joined()
    world = _this.world
    if world is not None and (world.context.world_size > 1) == is_torch_joined:
        return world
    if is_torch_joined:
        _this.world = _adopted()
    elif world is not None and world.context.world_size > 1:
        _this.world = None  # somebody else ended the group
    return _this.world


def _adopted() -> World:
    import torch
    import torch.distributed as dist

    from distributed.backends._torch.world import ProcessGroup

    size, rank = dist.get_world_size(), dist.get_rank()
    is_cuda = dist.get_backend() == "nccl"
    found = worker_environment() or WorkerEnvironment(rank, rank, size, size, 0, "", 0, 0, "torch")
    if is_cuda:
        found = dataclasses.replace(found, local_rank=torch.cuda.current_device())
    plan = ProcessPlan(1, size, "cuda" if is_cuda else "cpu", "torch.distributed")
    return ProcessGroup(plan, DistributedConfig(), _log.warning, found=found)


def _world() -> World:
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


# Collectives


def all_reduce(tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
    """Combine `tensor` over all ranks, in place; returns it. All ranks call it, with the same shape and type.

    Averages of float16 and bfloat16 are summed in float32; averages of whole numbers are refused.
    Raises ConfigError for arguments that are wrong, and before `init_process_group` where there are other ranks.
    """
    data, operation = _data(tensor, "all_reduce"), _operation(op, tensor)
    world = _world()
    if world.context.world_size == 1:
        return tensor
    wire = _wire(data, operation).contiguous()
    world.combine(wire, _on_wire(operation))
    _divide(wire, operation, world)
    if wire is not data:
        data.copy_(wire)
    return tensor


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `tensor`, in the order of ranks, as copies. All ranks call it; shapes may differ, types may not.

    Raises ConfigError on all ranks where the types differ.
    """
    data, world = _data(tensor, "all_gather").contiguous(), _world()
    if world.context.world_size == 1:
        return world.gather_tensors(data)
    shapes = _shapes(data, world)
    if len(set(shapes)) == 1:
        return world.gather_tensors(data)
    sizes = [_product(shape) for shape in shapes]
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data.reshape(-1)
    rows = world.gather_tensors(padded)
    return [row[:size].clone().view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


def broadcast(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Give `tensor` the values it has on rank `src`, in place; returns it. All ranks call it, with the same shape and type.

    Raises ConfigError where `src` is no rank.
    """
    data, world = _data(tensor, "broadcast"), _world()
    if not 0 <= src < world.context.world_size:
        raise ConfigError(f"src={src} is no rank of a world of {world.context.world_size}: ranks count from 0")
    wire = data.contiguous()
    world.copy_from(wire, src)
    if wire is not data:
        data.copy_(wire)
    return tensor


def reduce_scatter(
    tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Combine `tensor` [n, ...] over all ranks and return this rank's rows of it. All ranks call it, with the same shape.

    `sizes` are the numbers of rows of each rank, the same on all ranks; None means as even as can be, the first ranks get
    one more. Raises ConfigError for arguments that are wrong, and as `all_reduce`.
    """
    import torch

    data, operation = _data(tensor, "reduce_scatter"), _operation(op, tensor)
    world = _world()
    parts = _parts(data, sizes, world.context.world_size)
    wire, longest = _wire(data, operation), max(parts)
    if longest == 0:
        return data.clone()
    if len(set(parts)) > 1:
        padded = wire.new_zeros(len(parts), longest, *data.shape[1:])
        for row, part in zip(padded, torch.split(wire, parts), strict=True):
            row[: len(part)] = part
    else:
        padded = wire.contiguous().view(len(parts), longest, *data.shape[1:])
    mine = world.combine_rows(padded, _on_wire(operation))[: parts[world.context.rank]]
    _divide(mine, operation, world)
    return mine.to(data.dtype)


def barrier() -> None:
    """Wait until all ranks are here. All ranks call it."""
    _world().barrier()


@contextlib.contextmanager
def no_sync(model: Any = None) -> Iterator[None]:
    """Backward passes of forwards in this block keep their gradients local; the next outside averages the sums.

    `model` is a DistributedDataParallel, ours or torch's; None means every one of ours in this process.
    Raises ConfigError where there is none.
    """
    models = list(_this.wrappers) if model is None else [model]
    if not models or not all(hasattr(each, "no_sync") for each in models):
        what = "no model" if model is None else f"a {type(model).__name__}"
        raise ConfigError(f"no_sync() found {what}: wrap the model in DistributedDataParallel first")
    with contextlib.ExitStack() as stack:
        for each in models:
            stack.enter_context(each.no_sync())
        yield


# What they share


def _data(tensor: Any, call: str) -> torch.Tensor:
    """The tensor's own memory, without its graph."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{call}() got a {type(tensor).__name__}: pass a torch.Tensor, such as torch.tensor(value)")
    if tensor.layout != torch.strided:
        raise ConfigError(f"{call}() got a tensor of layout {tensor.layout}: pass tensor.to_dense()")
    return tensor.detach()


def _operation(op: Any, tensor: torch.Tensor) -> ReduceOp:
    try:
        operation = op if isinstance(op, ReduceOp) else ReduceOp(str.lower(op))
    except (TypeError, ValueError):
        names = ", ".join(each.name for each in ReduceOp)
        raise ConfigError(f"op={op!r} is not an operation of distributed.ReduceOp: use one of {names}") from None
    if operation is ReduceOp.AVERAGE and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(f"op=AVERAGE of {tensor.dtype} is not a whole number: use SUM, or tensor.float()")
    return operation


def _on_wire(operation: ReduceOp) -> str:
    return "sum" if operation is ReduceOp.AVERAGE else operation.value


def _wire(data: torch.Tensor, operation: ReduceOp) -> torch.Tensor:
    """Sums of many short floats overflow, or lose what the average still has."""
    is_short = operation is ReduceOp.AVERAGE and data.is_floating_point() and data.element_size() < 4
    return data.float() if is_short else data


def _divide(values: torch.Tensor, operation: ReduceOp, world: World) -> None:
    if operation is ReduceOp.AVERAGE:
        values.div_(world.context.world_size)


def _shapes(data: torch.Tensor, world: World) -> list[tuple[int, ...]]:
    """The shapes of all ranks' tensors. Raises ConfigError, on all ranks alike, where types differ."""
    import torch

    if data.dim() > _MAX_DIMENSIONS:
        raise ConfigError(f"all_gather() of {data.dim()} dimensions: at most {_MAX_DIMENSIONS}, use tensor.flatten()")
    kind = zlib.crc32(str(data.dtype).encode())
    header = [kind, data.dim(), *data.shape, *[0] * (_MAX_DIMENSIONS - data.dim())]
    rows = [row.tolist() for row in world.gather_tensors(torch.tensor(header, device=data.device))]
    others = [rank for rank, row in enumerate(rows) if row[0] != rows[0][0]]
    if others:
        raise ConfigError(
            f"all_gather() got another type on rank {others[0]} than on rank 0 (here {data.dtype}): use tensor.to(dtype)"
        )
    return [tuple(row[2 : 2 + row[1]]) for row in rows]


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _parts(data: torch.Tensor, sizes: Sequence[int] | None, world_size: int) -> list[int]:
    if data.dim() == 0:
        raise ConfigError("reduce_scatter() got a tensor without dimensions: pass [n, ...], whose rows go to the ranks")
    rows = data.shape[0]
    if sizes is None:
        return [rows // world_size + (rank < rows % world_size) for rank in range(world_size)]
    if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
        raise ConfigError(
            f"sizes={list(sizes)} is not one size for each of {world_size} ranks with the sum of {rows} rows"
        )
    return list(sizes)
