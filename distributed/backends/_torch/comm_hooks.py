"""How gradients travel, in the place of DDP's own all-reduce: one object for each `ddp.comm_hook`."""

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
    """Averages the gradients of a bucket over all ranks. Every rank calls it, bucket after bucket in one order."""

    has_memory = False  # keeps something between updates, which belongs into checkpoints
    notice: str | None = None  # what the user should know once

    @abc.abstractmethod
    def average(self, bucket: Any) -> Any:
        """Begin; returns the future of `bucket`'s buffer, averaged. `bucket`: torch's GradBucket."""

    def forget(self) -> None:
        """Drop the memory, which a gradient that was not finite has spoilt. All ranks."""

    def save(self, directory: Path, rank: int) -> dict[str, Any]:
        """Write this rank's memory into a checkpoint; returns the rest for state.json. Every rank."""
        return {}

    def load(self, directory: Path, rank: int, state: Mapping[str, Any]) -> None:
        """Take up what `save` wrote at the same world size."""

    def close(self) -> None:
        """Give back what the hook made beside the wrapper, which is gone by then."""


class Cast(CommHook):
    """Gradients in a shorter type on the wire. torch's own hook for bfloat16 refuses gloo, whose all-reduce of it works."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def average(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        short = buffer.to(self._dtype).div_(dist.get_world_size())
        future = dist.all_reduce(short, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(done.value()[0]))


class Hierarchical(CommHook):
    """Sums within groups of near ranks first, then each rank its share across the groups, so that a slow network between
    nodes carries a bucket once for each group and not once for each rank. The order of Horovod's hierarchical all-reduce
    (Sergeev, Del Balso, arXiv 1802.05799): reduce-scatter, all-reduce, all-gather.

    The stages of a bucket follow each other at once, in the order of the buckets on all ranks: begun from the callbacks of
    futures, gloo mixes up the messages of two buckets.
    """

    def __init__(self, groups: list[list[int]], timeout_s: float) -> None:
        """`groups`: the near ranks, all groups of one size. A collective."""
        self._near = _my_group(groups, timeout_s)
        self._far = _my_group([list(ranks) for ranks in zip(*groups, strict=True)], timeout_s)
        size, number = len(groups[0]), len(groups)
        which = f"ddp.comm_hook=hierarchical sums in {number} group{'s' * (number > 1)} of {size}"
        self.notice = which if number > 1 else f"{which}: the same as no hook"

    def average(self, bucket: Any) -> Any:
        # torch 2.13 has other names for them.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        buffer, near = bucket.buffer(), self._near.size()
        whole = torch.nn.functional.pad(buffer, (0, -len(buffer) % near)).div_(dist.get_world_size())
        share = whole.new_empty(len(whole) // near)
        scatter(share, whole, group=self._near)
        dist.all_reduce(share, group=self._far)
        future = gather(whole, share, group=self._near, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(whole[: len(buffer)]))

    def close(self) -> None:
        for group in (self._near, self._far):
            dist.destroy_process_group(group)
        del self._near, self._far


def _my_group(groups: list[list[int]], timeout_s: float) -> dist.ProcessGroup:
    make: Any = dist.new_subgroups_by_enumeration
    group: dist.ProcessGroup = make(groups, timeout=timedelta(seconds=timeout_s))[0]
    return group


def near_ranks(world: TorchWorld, group_size: int | None) -> list[list[int]]:
    """The groups of a hierarchical all-reduce: `group_size` ranks each, or those of one node. A collective.

    Raises ConfigError, on all ranks alike, where nodes have different numbers of ranks.
    """
    size = world.context.world_size
    if group_size is not None:
        return [list(range(first, first + group_size)) for first in range(0, size, group_size)]
    nodes = world.gather(world.context.node_rank)
    groups = [[rank for rank in range(size) if nodes[rank] == node] for node in sorted(set(nodes))]
    if len({len(ranks) for ranks in groups}) > 1:
        numbers = " and ".join(str(len(ranks)) for ranks in groups)
        raise ConfigError(
            f"ddp.comm_hook='hierarchical' needs as many processes on each node, and here are {numbers}: set"
            " ddp.hierarchical_group_size to a divisor of all"
        )
    return groups
