"""Split the user's data over ranks, in the order of the run, for every torch backend."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from distributed.backends._torch.collating import PLAIN, Batching
from distributed.backends._torch.divided_streams import DividedStream
from distributed.backends._torch.fetching import Fetcher, indexed_tensors
from distributed.backends._torch.loader_processes import read_loader, stop_workers
from distributed.backends._torch.sources import (
    Reduce,
    Source,
    draw_stream,
    gather,
    is_stream,
    loader_arguments,
    loader_batch_size,
    pinned,
    read_source,
    sample_count,
)
from distributed.backends._torch.stream_parts import Hook, hook_of
from distributed.backends._torch.streams import PreshardedData, StreamData, WholeBatches, has_position
from distributed.backends._torch.web_datasets import check_node_splitter
from distributed.backends.base import ShardedData
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.data import ComputedOrder, epoch_order, sample_seed, slices
from distributed.errors import ConfigError
from distributed.state import DataRole, MicroBatch, UpdateBatch, WorkerContext

__all__ = ["loader_batch_size", "shard"]

_Parts = list[tuple[range, int]]  # for each micro-batch: positions in the epoch, and the number of samples that count


def shard(
    data: Any,
    *,
    batch: BatchPlan,
    context: WorkerContext,
    config: DistributedConfig,
    options: DataOptions,
    role: DataRole,
    reduce: Reduce,
    batching: Batching = PLAIN,
    trained_on: Beginning | None = None,
) -> ShardedData:
    """Return this rank's part of `data`: a DataLoader, a map-style data set or an iterable.

    A collective if there are several ranks, because the ranks compare lengths. Raises the same ConfigError on every
    rank if `data` is none of these, is empty, lacks a required length or contradicts the settings.

    `trained_on` is the stream of the newest fit. If anything else reads the same stream, it reads a copy from its beginning, because a
    resume and each checkpoint use the position of the stream.
    """
    train = role.is_training
    source = read_source(data, config, role, presharded=options.presharded, batching=batching)
    check_node_splitter(source.dataset, source.name, context.world_size)
    if not train and trained_on is not None and getattr(data, "dataset", data) is trained_on.dataset:
        source = dataclasses.replace(source, dataset=_copied(source, trained_on.state))
    if train:
        _check_sizes(source, config)
    source = dataclasses.replace(source, is_for_gpu=context.device.startswith("cuda"))
    if options.presharded:
        local = _local(source, batch, context.rank, config.seed, train)
        return PreshardedData(local, batch, context.rank, source.name, reduce)
    agree = reduce if batch.data_parallel_size > 1 else None
    if source.is_stream:
        return _stream(source, batch, context.rank, config.seed, options, train=train, reduce=reduce)
    return MapData(source, batch, context.rank, config.seed, train=train, reduce=agree)


def _stream(
    source: Source, batch: BatchPlan, rank: int, seed: int, options: DataOptions, *, train: bool, reduce: Reduce
) -> ShardedData:
    """Return this rank's part of a stream. It has a notice if every rank must read all of it, unless the settings ask for that."""
    ranks, hook = batch.data_parallel_size, hook_of(source) if options.shard_streams else ""
    is_divisible = batch.global_batch_size % ranks == 0
    stream: ShardedData
    if isinstance(hook, Hook) and (hook.can_skip or (ranks > 1 and is_divisible)):
        stream = DividedStream(source, batch, rank, seed, hook, train=train, reduce=reduce)
    else:
        stream = StreamData(source, batch, rank, seed, train=train, reduce=reduce if ranks > 1 else None)
    if ranks > 1 and hook and not stream.has_own_cursor:
        size = f"global_batch_size={batch.global_batch_size}"
        why = hook if isinstance(hook, str) else f"{size} is not divisible by the {ranks} processes"
        stream.notices = [f"{source.name}: every rank must read the whole stream, because {why}"]
    return stream


class Beginning(NamedTuple):
    """A stream that tells its position, and its state before training."""

    dataset: Any
    state: Any


def beginning(data: Any, before: Beginning | None) -> Beginning | None:
    """Return the beginning of the training `data`, or None if training does not use a position. `before` is that of the last fit."""
    dataset = getattr(data, "dataset", data)
    if before is not None and before.dataset is dataset:  # its position may have been set
        return before
    if not is_stream(dataset) or not has_position(dataset, getattr(data, "num_workers", 0)):
        return None
    return Beginning(dataset, copy.deepcopy(dataset.state_dict()))


def _copied(source: Source, state: Any) -> Any:
    """Return a copy of the stream at `state`. Raises ConfigError if it cannot be copied."""
    try:
        copied = copy.deepcopy(source.dataset)
    except Exception as error:  # the user's class may raise anything
        raise ConfigError(
            f"{source.name} is the stream that train_data is, with a state_dict(), and cannot be copied ({type(error).__name__}: {error}):"
            " pass another object with the same samples"
        ) from error
    copied.load_state_dict(copy.deepcopy(state))
    return copied


def _local(source: Source, batch: BatchPlan, rank: int, seed: int, train: bool) -> ShardedData:
    """Return presharded data, which this rank reads as if it were the only rank. Each update uses this rank's share of
    the global batch size."""
    share = sum(map(len, slices(batch.global_batch_size, batch, rank)))
    if share == 0:
        raise ConfigError(
            f"global_batch_size={batch.global_batch_size} leaves ranks of presharded data without a sample:"
            f" set global_batch_size={batch.data_parallel_size} or more"
        )
    plan = BatchPlan(batch.batch_size, batch.gradient_accumulation_steps, 1, share)
    own_seed = sample_seed(seed, rank, 0)
    if source.yields_batches:
        return WholeBatches(source, plan, own_seed)
    if source.is_stream:
        return StreamData(source, plan, 0, own_seed, train=train, reduce=None, is_local=True)
    return MapData(source, plan, 0, own_seed, train=train, reduce=None, is_local=True)


class MapData(ShardedData):
    """Split a data set whose samples are accessed by index. Only samples that are used are read, also after a
    resume."""

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        seed: int,
        *,
        train: bool,
        reduce: Reduce | None,
        is_local: bool = False,
    ) -> None:
        """Lay out the first epoch. A collective unless `reduce` is None.

        `reduce` is None for a single rank. `is_local` marks one rank's own part, which may be empty.
        """
        self.batch, self._is_local = batch, is_local
        self._source, self._rank, self._seed, self._reduce = source, rank, seed, reduce
        self._fetcher = Fetcher(source.dataset, source.collate_fn, seed, train=train)
        self._drawn: tuple[int, list[Any]] | None = None
        self._full = slices(batch.global_batch_size, batch, rank)
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None
        self._own_sampler = source.sampler if source.batch_sampler is None else source.batch_sampler
        if self._own_sampler is None:
            self._lay_out(sample_count(source.dataset, source.name), None)
            self._agree(self.num_samples, "have data sets of different lengths")
        else:
            self._keys(0)
            if source.batch_sampler is not None:
                self.batch = _of_items(batch, max([1, *map(len, self._items(0))]))

    @property
    def updates_per_epoch(self) -> int | None:
        """The number of updates in the epoch that was started last."""
        return len(self._starts)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Return the update batches of `epoch` after `skip` global samples. A collective if the user gave a sampler."""
        self._end_iteration()
        keys = self._keys(epoch)
        starts = self._starts
        if skip not in starts:  # the checkpoint has another global batch size: continue from sample `skip`
            whole = range(skip, self.num_samples, self.batch.global_batch_size)
            starts = whole if isinstance(starts, range) else [skip, *(start for start in starts if start > skip)]
        read = self._from_workers if self._source.num_workers else self._in_process
        first = starts.index(skip) if skip < self.num_samples else len(starts)
        running = read(epoch, keys, starts[first:])
        self._running = running
        return running

    def close(self) -> None:
        """Stop the loader processes."""
        self._end_iteration()
        if self._loader is not None:
            stop_workers(self._loader._iterator)
            self._loader = None

    def _end_iteration(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def _keys(self, epoch: int) -> Any:
        """Return the key of the sample at each position of `epoch`, and lay out its updates."""
        source, own = self._source, self._own_sampler
        if own is None:
            count = sample_count(source.dataset, source.name)
            self._lay_out(count, None)
            return epoch_order(count, self._seed, epoch, source.shuffle, self.version)
        items = self._items(epoch)
        self._agree(zlib.crc32(repr(items).encode()) & 0xFFFFFF, f"draw different samples from {type(own).__name__}")
        if source.batch_sampler is None:
            self._lay_out(len(items), None)
            return _as_array(items)
        self._lay_out(sum(map(len, items)), [len(item) for item in items if len(item)])
        return _as_array([key for item in items for key in item])

    def _items(self, epoch: int) -> list[Any]:
        """Return the items that the user's sampler yields in `epoch`. They are drawn once."""
        if self._drawn is None or self._drawn[0] != epoch:
            source = self._source
            self._drawn = epoch, draw_stream(self._own_sampler, source.dataset, self._seed, epoch, source.name)
        return self._drawn[1]

    def _lay_out(self, count: int, sizes: list[int] | None) -> None:
        """Set the number of samples of an epoch and where its updates start.

        `sizes` are the sizes of a batch sampler's items, or None without one.
        """
        size = self.batch.global_batch_size
        self.num_samples: int = count - count % size if self._source.drop_last else count
        if sizes is not None and self.batch.max_batches:
            sizes = sizes[: self.batch.max_batches]
            self.num_samples = sum(sizes)
        elif self.batch.max_samples:
            self.num_samples = min(self.num_samples, self.batch.max_samples)
        if self.num_samples == 0 and not self._is_local:
            why = (
                f"drop_last leaves none of {count} samples with global_batch_size={size}"
                if count
                else "the data set is empty"
            )
            raise ConfigError(f"{self._source.name}: {why}: give more samples")
        self._starts: Sequence[int] = range(0, self.num_samples, size)
        if sizes is not None:
            self._starts = [0, *itertools.accumulate(sizes[:-1])]

    def _agree(self, value: int, what: str) -> None:
        """Raise ConfigError if `value` differs between ranks. A collective."""
        if self._reduce is None:
            return
        values = gather(self._reduce, self._rank, self.batch.data_parallel_size, value)
        if any(each != values[0] for each in values):
            raise ConfigError(
                f"{self._source.name}: the ranks {what}, but each takes its part of the same samples:"
                " give every rank the same data (seeded alike), or set data.presharded=true"
            )

    def _updates(self, starts: Sequence[int]) -> Iterator[tuple[int, int, _Parts]]:
        """Yield (position, size, parts) of the updates that start at `starts`."""
        ends = itertools.chain(itertools.islice(starts, 1, None), [self.num_samples])
        usual = self.batch.global_batch_size if self._source.batch_sampler is None else -1
        for start, end in zip(starts, ends, strict=False):
            own = self._full if end - start == usual else self._cut(end - start)
            yield start, end - start, [_positions_in_epoch(positions, start) for positions in own]

    def _keys_at(self, keys: Any, start: int, count: int) -> list[list[Any]]:
        """Return the keys of this rank's samples in the update of `count` samples at `start`, for each micro-batch."""
        parts = [_positions_in_epoch(positions, start) for positions in self._cut(count)]
        return [_at(keys, where)[:n] for where, n in parts]

    def _cut(self, count: int) -> list[range]:
        micro_batches = None
        if self._source.batch_sampler is not None:  # the sampler's items set the size of a batch, not `batch_size`
            fitting = -(-count // self.batch.data_parallel_size)
            micro_batches = min(self.batch.gradient_accumulation_steps, fitting)
        return slices(count, self.batch, self._rank, micro_batches)

    def _in_process(self, epoch: int, keys: Any, starts: Sequence[int]) -> Iterator[UpdateBatch]:
        read, keys_at = self._reader(epoch, keys), functools.partial(self._keys_at, keys)
        for start, count, parts in self._updates(starts):
            yield UpdateBatch([MicroBatch(read(where), n) for where, n in parts], count, start, keys_at)

    def _reader(self, epoch: int, keys: Any) -> Callable[[range], Any]:
        """Return a function that reads the samples at given positions. Tensor data sets are indexed without
        collating."""
        source = self._source
        is_by_index = isinstance(keys, numpy.ndarray | ComputedOrder)
        indexed = indexed_tensors(source.dataset, source.collate_fn) if is_by_index else None
        if indexed is None:
            return lambda where: pinned(source, self._fetcher(epoch, where, _at(keys, where), self.version))
        tensors, subset = indexed
        if subset is not None:
            subset = _from_the_front(subset, len(tensors[0]))
        elif isinstance(keys, numpy.ndarray):
            keys = _from_the_front(keys, len(tensors[0]))

        def read(where: range) -> Any:
            chosen = keys[where.start : where.stop : where.step]
            indices = torch.from_numpy(chosen if subset is None else subset[chosen])
            return [tensor.index_select(0, indices) for tensor in tensors]

        return (lambda where: pinned(source, read(where))) if source.pin_memory else read

    def _from_workers(self, epoch: int, keys: Any, starts: Sequence[int]) -> Iterator[UpdateBatch]:
        self._requests.now = lambda: (
            (epoch, where, _at(keys, where), self.version)
            for _, _, parts in self._updates(starts)
            for where, _ in parts
        )
        keys_at = functools.partial(self._keys_at, keys)
        with contextlib.closing(read_loader(self._worker_loader(epoch))) as batches:
            for start, count, parts in self._updates(starts):
                yield UpdateBatch([MicroBatch(next(batches), n) for _, n in parts], count, start, keys_at)

    def _worker_loader(self, epoch: int) -> DataLoader[Any]:
        user = self._source.loader
        assert user is not None
        if self._loader is None or not user.persistent_workers:
            dataset = _WorkerDataset(self._fetcher)
            self._loader = DataLoader(
                dataset,
                batch_sampler=self._requests,
                collate_fn=_as_fetched,
                pin_memory=self._source.pin_memory,
                persistent_workers=user.persistent_workers,
                **loader_arguments(self._source, self._seed, epoch),
            )
        return self._loader


def _check_sizes(source: Source, config: DistributedConfig) -> None:
    """Raise ConfigError if a batch size was given although a batch sampler of the loader makes the batches."""
    name = next((n for n in ("batch_size", "global_batch_size") if n in config.given), None)
    if name is not None and source.batch_sampler is not None:
        kind = type(source.batch_sampler).__name__
        value = config.given[name]
        raise ConfigError(
            f"{name}={value} contradicts the loader's {kind}, whose items are the batches: drop one of them"
        )


def _of_items(batch: BatchPlan, largest: int) -> BatchPlan:
    """Return `batch` for a batch sampler whose items, with at most `largest` samples, are the global batches."""
    world = batch.data_parallel_size
    steps = min(batch.gradient_accumulation_steps, -(-largest // world))
    size = -(-largest // (steps * world))
    return dataclasses.replace(
        batch, batch_size=size, gradient_accumulation_steps=steps, global_batch_size=largest, full_batch_size=0
    )


class _Requests:
    """Serve as the batch sampler of the loader processes. Its requests are set anew for each epoch."""

    def __init__(self) -> None:
        self.now: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.now()


class _WorkerDataset(Dataset[Any]):
    """Return one batch for one request, in a loader process."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitems__(self, request: tuple[int, range, list[Any], int]) -> Any:
        return self._fetcher(*request)


def _as_fetched(batch: Any) -> Any:
    return batch


def _positions_in_epoch(positions: range, start: int) -> tuple[range, int]:
    """Return (positions in the epoch, number of samples that count).

    An empty slice runs the update's first sample with weight 0.
    """
    if not positions:
        return range(start, start + 1), 0
    return range(positions.start + start, positions.stop + start, positions.step), len(positions)


def _from_the_front(indices: Any, length: int) -> Any:
    """Return `indices` with those that count from the end, such as -1, counted from the beginning."""
    return numpy.where(indices < 0, indices + length, indices)


def _at(keys: Any, where: range) -> list[Any]:
    chosen = keys[where.start : where.stop : where.step]
    return chosen.tolist() if isinstance(chosen, numpy.ndarray) else list(chosen)


def _as_array(keys: list[Any]) -> Any:
    """Return integer keys as an array, and any other keys unchanged."""
    if all(type(key) is int for key in keys):
        return numpy.asarray(keys, dtype=numpy.int64)
    return keys
