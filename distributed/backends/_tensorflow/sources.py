"""Split a user's data over ranks, in the order of the run: arrays, data sets with an index, tf.data, and torch's
data."""

from __future__ import annotations

import abc
import dataclasses
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import tensorflow as tf

from distributed.backends.arrays import ArrayData
from distributed.backends.base import ShardedData
from distributed.backends.forms import fault_of, is_array
from distributed.backends.twisters import NUMPY, PYTHON, SampleStates
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.data import epoch_order, sample_seeds, slices
from distributed.errors import ConfigError
from distributed.launching.engines import seed_python_and_numpy
from distributed.state import DataRole, MicroBatch, UpdateBatch, WorkerContext

Reduce = Callable[[Mapping[Any, float]], dict[Any, float]]
_BATCHING = {"_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "BatchDataset", "PaddedBatchDataset"}
# These data sets map each element to a data set.
_OF_INNER = {"_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset"}
# These data sets keep the sizes and the order of batches, so a short batch stays the last one.
_KEEPING = {"_PrefetchDataset", "_OptionsDataset", "_MapDataset", "_ParallelMapDataset", "_CacheDataset"}
_FORMS = "give (inputs, targets) as arrays, a tf.data.Dataset, a data set with __len__ and __getitem__, or a torch DataLoader"


def batch_size_of(data: Any) -> int | None:
    """Return the batch size that the user gave a tf.data.Dataset or a torch DataLoader, or None."""
    if _is_torch(data):
        from distributed.backends._torch.loading import loader_batch_size

        return loader_batch_size(data)
    if isinstance(data, tf.data.Dataset):
        return _batching(data)
    return None


def shard(
    data: Any, *, batch: BatchPlan, context: WorkerContext, config: DistributedConfig, role: DataRole, reduce: Reduce
) -> Data:
    """Return this rank's part of `data`. A collective if there are several ranks, because the ranks compare lengths.

    Raises ConfigError if `data` is in no supported form, is empty, or contradicts the settings.
    """
    name, train = role.value, role.is_training
    agree = None if context.world_size == 1 else reduce
    if _is_torch(data):
        return TorchData(data, batch, context, config, role, reduce)
    if isinstance(data, tf.data.Dataset):
        if train and config.shuffle:
            raise ConfigError("shuffle=True cannot order a tf.data.Dataset: use its own .shuffle(), or drop shuffle")
        return TensorFlowStreamData(data, batch, context.rank, name, agree)
    shuffle = train and (True if config.shuffle is None else config.shuffle)
    fetch, count = _indexed(data, role, config.seed)
    return TensorFlowMapData(fetch, count, batch, context.rank, config.seed, name, shuffle=shuffle, agree=agree)


class Data(ShardedData):
    """This rank's part of a data set."""

    @abc.abstractmethod
    def example(self) -> Any:
        """Return a batch to build a model with."""


class TensorFlowMapData(Data):
    """Split a data set whose samples are accessed by index. Only samples that are used are read, also after a
    resume."""

    def __init__(
        self,
        fetch: Callable[[int, range, Sequence[int], int], Any],
        count: int,
        batch: BatchPlan,
        rank: int,
        seed: int,
        name: str,
        *,
        shuffle: bool,
        agree: Reduce | None,
    ) -> None:
        if count == 0:
            raise ConfigError(f"{name}: the data set is empty: give more samples")
        self.batch, self.num_samples = batch, min(count, batch.max_samples or count)
        self._fetch, self._count, self._rank, self._seed, self._shuffle = fetch, count, rank, seed, shuffle
        self._full = slices(batch.global_batch_size, batch, rank)
        _compare(agree, rank, batch.data_parallel_size, count, f"{name}: the ranks have data sets of different lengths")

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of `epoch` after `skip` global samples."""
        count, size = self.num_samples or 0, self.batch.global_batch_size
        order = epoch_order(self._count, self._seed, epoch, self._shuffle, self.version)
        for start in range(skip, count, size):
            number = min(size, count - start)
            own = self._full if number == size else slices(number, self.batch, self._rank)
            micros = [self._micro(epoch, order, start, positions) for positions in own]
            yield UpdateBatch(micros, number, start, functools.partial(self._keys_at, order))

    def _keys_at(self, order: Any, start: int, number: int) -> list[list[Any]]:
        """Return the indices of this rank's samples in the update of `number` samples at `start`, for each micro-batch."""
        own = slices(number, self.batch, self._rank)
        return [
            [int(each) for each in order[start + cut.start : start + cut.stop : cut.step]] if cut else [] for cut in own
        ]

    def example(self) -> Any:
        """Return a batch of one sample."""
        return self._fetch(0, range(1), [0], self.version)

    def _micro(self, epoch: int, order: Any, start: int, positions: range) -> MicroBatch:
        where = (
            range(positions.start + start, positions.stop + start, positions.step)
            if positions
            else range(start, start + 1)
        )
        keys = order[where.start : where.stop : where.step]
        return MicroBatch(self._fetch(epoch, where, keys, self.version), len(positions))


class TensorFlowStreamData(Data):
    """Let every rank read the whole tf.data.Dataset and take its slice of every update by position.

    A data set that shuffles draws a new order each time that reading begins. A resume in epoch n therefore begins
    reading as often as the run had begun before. It then reads and drops the samples that were used already.
    """

    num_samples = None

    def __init__(self, data: Any, batch: BatchPlan, rank: int, name: str, agree: Reduce | None) -> None:
        self.batch, self._rank, self._name, self._agree = batch, rank, name, agree
        self._own_size = _batching(data)
        self._data = data
        samples = data.unbatch() if self._own_size is not None else data
        self._samples = samples
        self._times_read = 0
        self._is_compared = agree is None

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of `epoch` after `skip` global samples."""
        while self._times_read < epoch:
            self._times_read += 1
            next(iter(self._updates(0)), None)
        self._times_read += 1
        position = skip
        for update in self._updates(skip):
            number = len(tf.nest.flatten(update)[0])
            self._check(update)
            yield UpdateBatch(
                [self._micro(update, positions) for positions in slices(number, self.batch, self._rank)],
                number,
                position,
            )
            position += number
        if position == 0:
            raise ConfigError(f"{self._name}: the tf.data.Dataset yields no batch: give it samples")

    def example(self) -> Any:
        """Return a batch of one sample, made from the data set's element_spec."""
        return tf.nest.map_structure(
            lambda spec: numpy.zeros([1, *(size or 1 for size in spec.shape)], spec.dtype.as_numpy_dtype),
            self._samples.element_spec,
        )

    def _updates(self, skip: int) -> Iterator[Any]:
        size = self.batch.global_batch_size
        limit = self.batch.max_samples
        if limit:
            data = self._samples.take(limit).skip(skip).batch(size)
        elif self._own_size == size and skip % size == 0 and _has_short_batch_last(self._data):
            data = self._data.skip(skip // size)
        else:
            data = self._samples.skip(skip).batch(size)
        return iter(data.prefetch(1).as_numpy_iterator())

    def _micro(self, update: Any, positions: range) -> MicroBatch:
        where = slice(positions.start, positions.stop, positions.step) if positions else slice(0, 1)
        return MicroBatch(tf.nest.map_structure(lambda leaf: leaf[where], update), len(positions))

    def _check(self, update: Any) -> None:
        """Raise ConfigError if streams differ between ranks, because most samples would never be used. A collective:
        every rank must call it."""
        if self._is_compared:
            return
        self._is_compared = True
        import zlib

        digest = zlib.crc32(b"".join(numpy.ascontiguousarray(leaf).tobytes() for leaf in tf.nest.flatten(update)))
        what = f"{self._name}: the ranks read different streams (a .shuffle() without a seed, or files of their own)"
        _compare(self._agree, self._rank, self.batch.data_parallel_size, digest & 0xFFFFFF, what)


class TorchData(Data):
    """Load data with torch, and yield it as arrays."""

    def __init__(
        self,
        data: Any,
        batch: BatchPlan,
        context: WorkerContext,
        config: DistributedConfig,
        role: DataRole,
        reduce: Reduce,
    ) -> None:
        from distributed.backends._torch.loading import shard as torch_shard

        self._inner = torch_shard(
            data,
            batch=batch,
            context=context,
            config=config,
            options=config.options("data"),
            role=role,
            reduce=reduce,
        )
        self.batch, self.num_samples = self._inner.batch, self._inner.num_samples
        self.notices = self._inner.notices

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates per epoch of the inner data."""
        return self._inner.updates_per_epoch

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of `epoch` after `skip` global samples."""
        for update_batch in self._inner.epoch(epoch, skip):
            micros = [MicroBatch(_arrays(micro.batch), micro.num_samples) for micro in update_batch.micro_batches]
            yield dataclasses.replace(update_batch, micro_batches=micros)

    def example(self) -> Any:
        """Return the first batch of the first epoch."""
        batch = next(iter(self.epoch(0))).micro_batches[0].batch
        self._inner.close()
        return batch

    def use_version(self, version: int) -> None:
        """Read later epochs of the inner data in the order of `version`."""
        self._inner.use_version(version)

    def close(self) -> None:
        """Stop loader processes."""
        self._inner.close()


def _indexed(data: Any, role: DataRole, seed: int) -> tuple[Callable[[int, range, Sequence[int], int], Any], int]:
    """Return a function that fetches a batch, and the number of samples, for arrays or a data set with an index.

    The arguments of the function are the epoch, the positions, the indices at these, and the version of the order.
    """
    name = role.value
    if isinstance(data, ArrayData):
        return lambda epoch, where, keys, version: tuple(data.__getitems__(keys)), len(data)
    if type(data).__mro__[-2].__name__ == "PyDataset" or any(c.__name__ == "PyDataset" for c in type(data).__mro__):
        raise ConfigError(
            f"{name}: a keras PyDataset yields whole batches, which cannot be divided among the ranks: {_FORMS}"
        )
    takes_inputs = role is DataRole.PREDICTION
    pair = f"{'one array of inputs, or ' * takes_inputs}the tuple (inputs, targets)"
    if not isinstance(data, tuple) and (fault := fault_of(data, pair)) is not None:
        raise ConfigError(f"{name}: {fault}")
    if _has_rows(data) and not takes_inputs:
        raise ConfigError(f"{name}: an array is not a data set: give {pair}, or the tuple (inputs,) without targets")
    leaves = tf.nest.flatten(data) if isinstance(data, (tuple, Mapping)) or _has_rows(data) else []
    if leaves and all(map(_has_rows, leaves)):
        arrays = tf.nest.map_structure(_array, data)
        lengths = {len(leaf) for leaf in tf.nest.flatten(arrays)}
        if len(lengths) > 1:
            raise ConfigError(
                f"{name}: arrays of {' and '.join(map(str, sorted(lengths)))} samples: give as many of each"
            )
        return lambda epoch, where, keys, version: _rows_of(arrays, keys), lengths.pop()
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes, Mapping)):
        return _Fetcher(data, seed, name), len(data)
    raise ConfigError(f"{name}: {type(data).__name__} cannot be divided among the ranks: {_FORMS}")


def _rows_of(arrays: Any, keys: Sequence[int]) -> Any:
    return tf.nest.map_structure(lambda array: array[numpy.asarray(keys)], arrays)


class _Fetcher:
    """Fetch samples by index and join them into a batch. The random numbers that a data set draws from numpy's and
    Python's generators depend only on (seed, epoch, position)."""

    def __init__(self, dataset: Any, seed: int, name: str) -> None:
        self._dataset, self._seed, self._name = dataset, seed, name

    def __call__(self, epoch: int, where: range, keys: Sequence[int], version: int) -> Any:
        states = random.getstate(), numpy.random.get_state()
        try:
            seeds = sample_seeds(self._seed, epoch, where)
            begin = _begin_by_seed(seeds) if version < 3 else SampleStates(seeds, PYTHON | NUMPY).begin
            samples = [self._sample(begin, number, int(key)) for number, key in enumerate(keys)]
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
        try:
            return tf.nest.map_structure(lambda *each: numpy.stack([_array(value) for value in each]), *samples)
        except ValueError as error:
            text = str(error).partition("\n")[0]
            raise ConfigError(f"{self._name}: samples do not make a batch ({text}): give them one shape") from None

    def _sample(self, begin: Callable[[int], None], number: int, key: int) -> Any:
        begin(number)
        return self._dataset[key]


def _begin_by_seed(seeds: Sequence[int]) -> Callable[[int], None]:
    """Return a function that seeds the generators for the i-th sample, as before version 3 of the order."""
    return lambda number: seed_python_and_numpy(seeds[number], seeds[number] >> 32)


def _batching(data: Any) -> int | None:
    """Return the size of the batches that a tf.data.Dataset yields, or None if it yields samples."""
    kind = type(data).__name__
    if "Unbatch" in kind:
        return None
    if kind in _BATCHING:
        return int(data._batch_size)
    if kind in _OF_INNER:
        return _of_inner(data)
    sizes = {_batching(each) for each in data._inputs()}  # several sizes if data sets are zipped
    if len(sizes) > 1:
        words = sorted("samples" if size is None else f"batches of {size}" for size in sizes)
        raise ConfigError(f"the tf.data.Dataset joins {' and '.join(words)}: batch it after they are joined")
    return sizes.pop() if sizes else None


def _of_inner(data: Any) -> int | None:
    """Return the batch size after flat_map or interleave: None if they split each batch into samples, or the size before
    them if they keep batches. The numbers of dimensions before and after tell these cases apart."""
    (source,) = data._inputs()
    size = _batching(source)
    if size is None:
        return None
    fewer = {before - now for before, now in zip(_ranks(source), _ranks(data), strict=False)}
    if len(_ranks(source)) == len(_ranks(data)) and fewer in ({0}, {1}):
        return size if fewer == {0} else None
    raise ConfigError(
        f"the tf.data.Dataset changes batches of {size} with flat_map or interleave: batch it after these"
    )


def _ranks(data: Any) -> list[int]:
    return [len(spec.shape) for spec in tf.nest.flatten(data.element_spec)]


def _has_short_batch_last(data: Any) -> bool:
    """Return True if all batches except the last have the size that `_batching` returns. This does not hold after
    .repeat() or .rebatch()."""
    while type(data).__name__ in _KEEPING:
        data = data._input_dataset
    return type(data).__name__ in _BATCHING


def _is_torch(data: Any) -> bool:
    """Return True if `data` is a DataLoader or a Dataset of torch. Does not import torch."""
    torch = sys.modules.get("torch.utils.data")
    return torch is not None and isinstance(data, (torch.DataLoader, torch.Dataset))


def _has_rows(value: Any) -> bool:
    return is_array(value) and len(value.shape) > 0


def _array(value: Any) -> Any:
    return numpy.asarray(value)


def _arrays(batch: Any) -> Any:
    """Return a batch of torch's tensors as arrays in tuples, which TensorFlow accepts."""
    if isinstance(batch, Mapping):
        return {name: _arrays(value) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_arrays(value) for value in batch)
    return numpy.asarray(batch)


def _compare(agree: Reduce | None, rank: int, world: int, value: int, what: str) -> None:
    """Raise ConfigError if `value` differs between ranks. A collective: every rank must call it."""
    if agree is None:
        return
    values = agree({r: float(value) if r == rank else 0.0 for r in range(world)})
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"{what}, but each takes its part of the same samples: give every rank the same data, seeded alike"
        )
