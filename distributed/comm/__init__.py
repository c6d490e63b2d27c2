"""Communication for scripts that do not use `Trainer`, the same in one process and in many. Collectives of engines belong to `backends`.

In a process without a launcher, a world of one, every call is defined and costs nothing. Importing this loads no framework.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributed.comm.membership import (
    current_world,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    wrappers,
)
from distributed.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.world import TorchWorld

__all__ = [
    "ReduceOp", "all_gather", "all_reduce", "barrier", "broadcast", "destroy_process_group", "get_distributed_info",
    "get_rank", "get_world_size", "init_process_group", "is_initialized", "no_sync", "reduce_scatter",
]  # fmt: skip


class ReduceOp(enum.Enum):
    """How values of all ranks become one."""

    SUM = "sum"
    AVERAGE = "average"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


def all_reduce(tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
    """Combine `tensor` over all ranks, in place; returns it. All ranks call it, with the same shape and type.

    Averages of float16 and bfloat16 are summed in float32; averages of whole numbers are refused.
    Raises ConfigError for arguments that are wrong, and before `init_process_group` where there are other ranks.
    """
    data, operation = _data(tensor, "all_reduce"), _operation(op, tensor)
    world = current_world()
    if world.context.world_size == 1:
        return tensor
    wire = _wire(data, operation).contiguous()
    world.combine(wire, _on_wire(operation)).wait()
    _divide(wire, operation, world)
    if wire is not data:
        data.copy_(wire)
    return tensor


def all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `tensor`, in the order of ranks, as copies. All ranks call it; shapes may differ, types may not.

    Raises ConfigError on all ranks where the types differ.
    """
    data, world = _data(tensor, "all_gather").contiguous(), current_world()
    if world.context.world_size == 1:
        return world.gather_tensors(data)
    shapes = _shapes(data, world)
    if len(set(shapes)) == 1:
        return world.gather_tensors(data)
    sizes = [math.prod(shape) for shape in shapes]
    padded = data.new_zeros(max(sizes))
    padded[: data.numel()] = data.reshape(-1)
    rows = world.gather_tensors(padded)
    return [row[:size].clone().view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]


def broadcast(tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Give `tensor` the values it has on rank `src`, in place; returns it. All ranks call it, with the same shape and type.

    Raises ConfigError where `src` is no rank.
    """
    data, world = _data(tensor, "broadcast"), current_world()
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
    world = current_world()
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
    current_world().barrier()


@contextlib.contextmanager
def no_sync(model: Any = None) -> Iterator[None]:
    """Backward passes of forwards in this block keep their gradients local; the next outside averages the sums.

    `model` is a DistributedDataParallel, ours or torch's; None means every one of ours in this process.
    Raises ConfigError where there is none.
    """
    models = list(wrappers()) if model is None else [model]
    if not models or not all(hasattr(each, "no_sync") for each in models):
        what = "no model" if model is None else f"a {type(model).__name__}"
        raise ConfigError(f"no_sync() found {what}: wrap the model in DistributedDataParallel first")
    with contextlib.ExitStack() as stack:
        for each in models:
            stack.enter_context(each.no_sync())
        yield


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


def _divide(values: torch.Tensor, operation: ReduceOp, world: TorchWorld) -> None:
    if operation is ReduceOp.AVERAGE:
        values.div_(world.context.world_size)


def _shapes(data: torch.Tensor, world: TorchWorld) -> list[tuple[int, ...]]:
    """The shapes of all ranks' tensors. Raises ConfigError, on all ranks alike, where types differ."""
    found = world.gather((str(data.dtype), tuple(data.shape)))
    others = [(rank, kind) for rank, (kind, _) in enumerate(found) if kind != found[0][0]]
    if others:
        rank, kind = others[0]
        raise ConfigError(f"all_gather() got {kind} on rank {rank} and {found[0][0]} on rank 0: use tensor.to(dtype)")
    return [shape for _, shape in found]


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
