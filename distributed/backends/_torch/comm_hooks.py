"""Average gradients in place of DDP's own all-reduce, with one class for each value of `ddp.comm_hook`."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.backends._torch.world import TorchWorld
from distributed.errors import ConfigError


class CommHook(abc.ABC):
    """Average the gradients of a bucket over all ranks.

    Every rank calls the hook for the same buckets in the same order.
    """

    has_memory = False  # whether the hook keeps state between updates, which checkpoints must contain
    notice: str | None = None  # a message for the user, logged once

    @abc.abstractmethod
    def average(self, bucket: Any) -> Any:
        """Start averaging and return the future of the averaged buffer of `bucket`, a torch GradBucket. All ranks must
        call it."""

    def forget(self) -> None:
        """Discard the state of the hook after a non-finite gradient has corrupted it. All ranks must call it."""

    def save(self, directory: Path, rank: int) -> dict[str, Any]:
        """Write this rank's state into a checkpoint and return the rest for state.json. All ranks must call it."""
        return {}

    def load(self, directory: Path, rank: int, state: Mapping[str, Any]) -> None:
        """Restore what `save` wrote at the same world size."""

    def close(self) -> None:
        """Release what the hook created. Called after the DDP wrapper has been dropped."""


class Cast(CommHook):
    """Send gradients in a shorter element type.

    Workaround (torch 2.13, no upstream issue known; may go when torch's own hook for bfloat16 takes gloo): that hook
    refuses gloo, although gloo's all-reduce supports bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def average(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        short = buffer.to(self._dtype).div_(dist.get_world_size())
        future = dist.all_reduce(short, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))


class Hierarchical(CommHook):
    """Sum gradients within groups of near ranks first, then across the groups.

    A slow network between nodes then carries each bucket once per group instead of once per rank. The order is that of
    Horovod's hierarchical all-reduce (Sergeev, Del Balso, arXiv 1802.05799): reduce-scatter, all-reduce, all-gather.

    All stages of a bucket are issued immediately, in the order of the buckets on all ranks. Workaround (torch 2.13, no
    upstream issue known; may go when gloo keeps collectives of two buckets apart): if the stages are issued from the
    callbacks of futures, gloo mixes up the messages of two buckets.
    """

    def __init__(self, groups: list[list[int]], timeout_s: float) -> None:
        """Create the process groups. `groups` are the groups of near ranks, all of the same size. A collective."""
        self._near = _my_group(groups, timeout_s)
        self._far = _my_group([list(ranks) for ranks in zip(*groups, strict=True)], timeout_s)
        size, number = len(groups[0]), len(groups)
        which = f"ddp.comm_hook=hierarchical sums in {number} group{'s' * (number > 1)} of {size}"
        self.notice = which if number > 1 else f"{which}: the same as no hook"

    def average(self, bucket: Any) -> Any:
        # torch before 2.13 has these functions under their old names.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        buffer, near = bucket.buffer(), self._near.size()
        whole = torch.nn.functional.pad(buffer, (0, -len(buffer) % near)).div_(dist.get_world_size())
        share = whole.new_empty(len(whole) // near)
        scatter(share, whole, group=self._near)
        dist.all_reduce(share, group=self._far)
        future = gather(whole, share, group=self._near, async_op=True).get_future()

        def fill(done: Any) -> torch.Tensor:
            done.value()  # raises the error of the gather, which leaves `whole` unfilled
            filled: torch.Tensor = buffer.copy_(whole[: len(buffer)])
            return filled

        return future.then(fill)

    def close(self) -> None:
        for group in (self._near, self._far):
            dist.destroy_process_group(group)
        del self._near, self._far


def _my_group(groups: list[list[int]], timeout_s: float) -> dist.ProcessGroup:
    make: Any = dist.new_subgroups_by_enumeration
    group: dist.ProcessGroup = make(groups, timeout=timedelta(seconds=timeout_s))[0]
    return group


def near_ranks(world: TorchWorld, group_size: int | None) -> list[list[int]]:
    """Return the groups of a hierarchical all-reduce: `group_size` ranks each, or the ranks of each node. A collective.

    Raises ConfigError on all ranks if nodes have different numbers of ranks.
    """
    size = world.context.world_size
    if group_size is not None:
        return [list(range(first, first + group_size)) for first in range(0, size, group_size)]
    nodes = world.gather(world.context.node_rank)
    groups = [[rank for rank in range(size) if nodes[rank] == node] for node in sorted(set(nodes))]
    if len({len(ranks) for ranks in groups}) > 1:
        numbers = " and ".join(str(len(ranks)) for ranks in groups)
        raise ConfigError(
            f"ddp.comm_hook='hierarchical' needs the same number of processes on each node, and they are {numbers}: set"
            " ddp.hierarchical_group_size to a divisor of the number of processes"
        )
    return groups
