"""Several ranks in one process, for tests of what is cut over them: threads that take turns and meet in `reduce`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distributed.backends._torch.collating import PLAIN, Batching
from distributed.backends._torch.loading import shard
from distributed.backends.base import ShardedData
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.state import DataRole, UpdateBatch, WorkerContext

Reduce = Callable[[Mapping[str, float]], dict[str, float]]


def on_ranks(world: int, work: Callable[[int, Reduce], Any]) -> list[Any]:
    """`work(rank, reduce)` of every rank. Only one runs at a time, as the generators of a process are shared."""
    barrier, turn = threading.Barrier(world, timeout=20), threading.Lock()
    parts: list[Mapping[str, float]] = [{}] * world

    def run(rank: int) -> Any:
        def reduce(sums: Mapping[str, float]) -> dict[str, float]:
            parts[rank] = dict(sums)
            turn.release()
            try:
                barrier.wait()
                total = {name: sum(part[name] for part in parts) for name in sums}
                barrier.wait()
            finally:
                turn.acquire()
            return total

        with turn:
            return work(rank, reduce)

    with ThreadPoolExecutor(world) as pool:
        waiting = [pool.submit(run, rank) for rank in range(world)]
        failures = [each.exception() for each in waiting]
        causes = [error for error in failures if error and not isinstance(error, threading.BrokenBarrierError)]
        for error in causes or [error for error in failures if error]:
            raise error
        return [each.result() for each in waiting]


def plan(world: int = 1, size: int = 4, steps: int = 1, total: int | None = None) -> BatchPlan:
    return BatchPlan(size, steps, world, world * size * steps if total is None else total)


def sharded(
    data: Any,
    batch: BatchPlan | None = None,
    rank: int = 0,
    reduce: Reduce = dict,
    *,
    train: bool = True,
    role: DataRole | None = None,
    presharded: bool = False,
    shard_streams: bool = True,
    batching: Batching = PLAIN,
    **settings: Any,
) -> ShardedData:
    """One rank's part of `data`."""
    batch = batch or plan()
    world = batch.data_parallel_size
    return shard(
        data,
        batch=batch,
        context=WorkerContext(rank, world, rank, world, 0, "cpu"),
        config=DistributedConfig(**settings),
        options=DataOptions(presharded=presharded, shard_streams=shard_streams),
        role=role or (DataRole.TRAINING if train else DataRole.VALIDATION),
        reduce=reduce,
        batching=batching,
    )


def groups_of_ranks(
    data: Any,
    batch: BatchPlan,
    *,
    epoch: int = 0,
    skip: int = 0,
    per_rank: bool = False,
    version: int | None = None,
    **settings: Any,
) -> list[list[UpdateBatch]]:
    """All update batches of an epoch, by rank. `per_rank`: `data` is a list with each rank's own."""

    def work(rank: int, reduce: Reduce) -> list[UpdateBatch]:
        part = sharded(data[rank] if per_rank else data, batch, rank, reduce, **settings)
        if version is not None:
            part.use_version(version)
        try:
            return list(part.epoch(epoch, skip))
        finally:
            part.close()

    return on_ranks(batch.data_parallel_size, work)


def samples_used(ranks: list[list[UpdateBatch]], read: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """For every update the samples that count, over all ranks; checks what must hold at any time."""
    assert len({len(groups) for groups in ranks}) == 1
    updates = []
    for groups in zip(*ranks, strict=True):
        assert len({(len(g.micro_batches), g.num_samples, g.position) for g in groups}) == 1
        used = []
        for group in groups:
            for micro in group.micro_batches:
                values = read(micro.batch)
                assert len(values) == max(1, micro.num_samples) or micro.num_samples == 0
                used += values if micro.num_samples else []
        assert len(used) == groups[0].num_samples
        updates.append(used)
    return updates
