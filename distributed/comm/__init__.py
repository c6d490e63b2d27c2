"""Communication for scripts without `Trainer`, the same in one process and in many; collectives of engines belong in `backends`.

In a process without a launcher the world has one rank: every call works, without communication. Importing this module
loads no framework.
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
    """Operations that combine the values of all ranks."""

    SUM = "sum"
    AVERAGE = "average"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


def all_reduce(tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
    """Combine `tensor` over all ranks, in place, and return it. Every rank must call it.

    Averages of float16 and bfloat16 are summed in float32. Averages of integers are refused.

    Args:
        tensor: a dense tensor, with the same shape and dtype on all ranks.
        op: a `ReduceOp` or its name, such as "sum".

    Returns:
        `tensor`.

    Raises:
        ConfigError: an argument is wrong, or there are other ranks and `init_process_group` was not called.
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
    """Return copies of the tensors of all ranks, in the order of ranks. Every rank must call it.

    Args:
        tensor: a dense tensor. Shapes may differ between ranks, dtypes may not.

    Returns:
        One tensor per rank, each with that rank's shape.

    Raises:
        ConfigError: on all ranks, if the dtypes differ. Also in the cases of `all_reduce`.
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
    """Copy the values of `tensor` on rank `src` to all ranks, in place, and return it. Every rank must call it.

    Args:
        tensor: a dense tensor, with the same shape and dtype on all ranks.
        src: the rank whose values are copied.

    Returns:
        `tensor`.

    Raises:
        ConfigError: `src` is not a rank. Also in the cases of `all_reduce`.
    """
    data, world = _data(tensor, "broadcast"), current_world()
    if not 0 <= src < world.context.world_size:
        raise ConfigError(f"src={src} is not a rank of a world of {world.context.world_size}: ranks count from 0")
    wire = data.contiguous()
    world.copy_from(wire, src)
    if wire is not data:
        data.copy_(wire)
    return tensor


def reduce_scatter(
    tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Combine `tensor` over all ranks and return this rank's rows of the result. Every rank must call it.

    Args:
        tensor: a dense tensor of shape `[n, ...]`, with the same shape and dtype on all ranks.
        op: a `ReduceOp` or its name, such as "sum".
        sizes: the number of rows for each rank, the same on all ranks. None splits them as evenly as possible, with the
            remaining rows on the first ranks.

    Returns:
        A tensor of shape `[sizes[rank], ...]`.

    Raises:
        ConfigError: an argument is wrong. Also in the cases of `all_reduce`.
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
    mine = world.reduce_scatter(padded, _on_wire(operation))[: parts[world.context.rank]]
    _divide(mine, operation, world)
    return mine.to(data.dtype)


def barrier() -> None:
    """Wait until all ranks have called this function. Every rank must call it.

    Raises ConfigError if there are other ranks and `init_process_group` was not called.
    """
    current_world().barrier()


@contextlib.contextmanager
def no_sync(model: Any = None) -> Iterator[None]:
    """Return a context manager inside which gradients are not averaged over the ranks.

    Gradients of forward passes inside it accumulate locally. The next backward pass outside averages the accumulated
    sums.

    Args:
        model: a DistributedDataParallel of this package or of torch. None means every one of this package in this process.

    Returns:
        The context manager, for one `with` statement.

    Raises:
        ConfigError: there is no such model.
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
    """Return the tensor's data without its autograd graph. Raises ConfigError for anything but a dense tensor."""
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
        raise ConfigError(f"op=AVERAGE needs a floating-point tensor, not {tensor.dtype}: use SUM, or tensor.float()")
    return operation


def _on_wire(operation: ReduceOp) -> str:
    return "sum" if operation is ReduceOp.AVERAGE else operation.value


def _wire(data: torch.Tensor, operation: ReduceOp) -> torch.Tensor:
    """Return the data to sum.

    Short floats are converted, because their sums can overflow or lose digits of the average.
    """
    is_short = operation is ReduceOp.AVERAGE and data.is_floating_point() and data.element_size() < 4
    return data.float() if is_short else data


def _divide(values: torch.Tensor, operation: ReduceOp, world: TorchWorld) -> None:
    if operation is ReduceOp.AVERAGE:
        values.div_(world.context.world_size)


def _shapes(data: torch.Tensor, world: TorchWorld) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of all ranks. Raises ConfigError, on all ranks, if the dtypes differ."""
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
            f"sizes={list(sizes)} must be one size for each of {world_size} ranks, and their sum must be {rows} rows"
        )
    return list(sizes)
