"""Read streams: split them over ranks by position, or take the parts that the user has split already."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from distributed.backends._torch import sample_rng
from distributed.backends._torch.fetching import STREAM, Fetcher, announce_epoch
from distributed.backends._torch.loader_processes import read_loader
from distributed.backends._torch.sources import (
    Reduce,
    Source,
    gather,
    has_state,
    is_of_hugging_face,
    is_stream,
    loader_arguments,
    one_shot_error,
    pinned,
    sample_count,
)
from distributed.backends.base import ShardedData
from distributed.config.plan import BatchPlan
from distributed.data import ComputedOrder, epoch_order, sample_seed, slices
from distributed.errors import ConfigError
from distributed.state import MicroBatch, UpdateBatch

CHUNK = 32  # samples that a loader process reads in a row if the loader sets no batch size


class StreamData(ShardedData):
    """Let every rank read the whole stream and take its slice of every update by position.

    In the main process the stream draws from a separate generator state seeded by (seed, epoch), the same at any
    world size. Loader processes are seeded by (seed, epoch, worker) and start anew each epoch, so that they see
    `set_epoch`. Their order is that of the user's own DataLoader. A resume reads the used samples again and drops
    them, unless the stream reports its position (see `StreamPosition`).
    """

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
        """Prepare the stream.

        `reduce` is None for a single rank. `is_local` marks one rank's own part, which may be empty.
        """
        self.batch, self._is_local = batch, is_local
        self.num_samples = length_of(source, batch)
        self._source, self._rank, self._seed, self._reduce = source, rank, seed, reduce
        self._fetcher = Fetcher(source.dataset, source.collate_fn, seed, train=train)
        self._running: Iterator[UpdateBatch] | None = None
        self._was_read = False
        self._position = StreamPosition(source)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Return the update batches of `epoch` after `skip` global samples.

        The first update batch is a collective: ranks compare streams.
        """
        self.close()
        if isinstance(self._source.dataset, Iterator) and self._was_read:
            raise one_shot_error(self._source, f"epoch {epoch + 1}")
        self._was_read = True
        self._running = self._update_batches(epoch, skip)
        return self._running

    def close(self) -> None:
        """Stop the loader processes."""
        _finish(self._running)
        self._running = None

    def cursor(self, samples: int) -> dict[str, Any] | None:
        """Return the position of the stream after `samples` samples, or None if the stream does not report it."""
        return self._position.cursor(samples)

    def seek(self, cursor: Mapping[str, Any] | None) -> None:
        """Let the next `epoch` begin at `cursor` without reading the used samples again."""
        self._position.sought = cursor

    def _update_batches(self, epoch: int, skip: int) -> Iterator[UpdateBatch]:
        announce_epoch(self._source.dataset, epoch)
        randomness = self._own_stream(epoch)
        used = skip if self._position.begin(epoch, skip, randomness) else 0
        limit = self.batch.max_samples or None
        stream = itertools.islice(self._samples(epoch), limit and max(0, limit - used))
        updates = _read_in_pieces(stream, self.batch.global_batch_size, skip - used, randomness)
        position, is_first = skip, True
        for samples in updates:
            if is_first and self._reduce is not None:
                self._compare(samples, self._reduce)
            if self._source.drop_last and len(samples) < self.batch.global_batch_size:
                break
            is_first = False
            update_batch = self._update_batch(epoch, position, samples)
            position += len(samples)
            self._position.reached = position
            yield update_batch
            self._position.mark()
        if position == 0 and not self._is_local:
            kind = type(self._source.dataset).__name__
            raise ConfigError(f"{self._source.name}: {kind} yields no batch: give it samples")

    def _update_batch(self, epoch: int, position: int, samples: list[Any]) -> UpdateBatch:
        micro_batches = []
        for positions in slices(len(samples), self.batch, self._rank):
            own = [samples[i] for i in positions] or samples[:1]
            batch = self._fetcher.collate(epoch, position + (positions.start if positions else 0), own)
            micro_batches.append(MicroBatch(pinned(self._source, batch), len(positions)))
        return UpdateBatch(micro_batches, len(samples), position)

    def _samples(self, epoch: int) -> Iterator[Any]:
        """Yield the whole stream. It is opened at the first sample."""
        source = self._source
        if source.num_workers == 0:
            yield from source.dataset
            return
        assert source.loader is not None
        size = source.loader.batch_size or 1
        loader: DataLoader[Any] = DataLoader(
            source.dataset,
            batch_size=size if size > 1 else CHUNK,
            collate_fn=packed,
            **loader_arguments(source, self._seed, epoch),
        )
        for chunk in read_loader(loader):
            yield from pickle.loads(chunk)

    def _own_stream(self, epoch: int) -> sample_rng.OwnStream:
        return sample_rng.OwnStream(sample_seed(self._seed, epoch, 0, STREAM))

    def _compare(self, samples: list[Any], reduce: Reduce) -> None:
        """Raise ConfigError if streams differ between ranks, because most samples would never be read. A collective."""
        digest = digest_of(samples[:4]) & 0xFFFFFF  # a number that float32 can represent exactly
        digests = gather(reduce, self._rank, self.batch.data_parallel_size, digest)
        if any(each != digests[0] for each in digests):
            raise ConfigError(
                f"{self._source.name}: the ranks read different streams, but each rank takes its part of the same one:"
                " yield all samples on every rank, or set data.presharded=true"
            )


class StreamPosition:
    """Track the position of a stream that has `state_dict` and `load_state_dict`, as those of Hugging Face's `datasets` have.

    Such a stream continues at once after a resume. A stream is read again from its beginning if loader processes read it, if it
    draws random numbers from the global generators, or if its state lacks something, such as the content of a shuffle buffer.
    """

    def __init__(self, source: Source) -> None:
        dataset = source.dataset
        self._has_state = has_position(dataset, source.num_workers)
        self._dataset = dataset
        self._randomness: sample_rng.OwnStream | None = None
        self._epoch = self.reached = 0
        self._marked: tuple[int, Any] = (-1, None)  # (samples, state) before the newest update batch
        self.sought: Mapping[str, Any] | None = None  # the cursor at which the next epoch begins

    def begin(self, epoch: int, skip: int, randomness: sample_rng.OwnStream) -> bool:
        """Begin an epoch after `skip` samples. Return whether the stream itself continues from there."""
        sought, self.sought = self.sought, None
        self._epoch, self.reached, self._randomness = epoch, skip, randomness
        is_there = self._has_state and sought is not None and "state" in sought
        is_there = is_there and (sought["epoch"], sought["samples"]) == (epoch, skip)  # type: ignore[index]
        if is_there:
            assert sought is not None
            self._dataset.load_state_dict(copy.deepcopy(sought["state"]))
        return is_there

    def mark(self) -> None:
        """Keep the state before one more update batch is read, because training may end without it."""
        if self._has_state:
            self._marked = self.reached, copy.deepcopy(self._dataset.state_dict())

    def cursor(self, samples: int) -> dict[str, Any] | None:
        """Return the cursor after `samples`, or None if the stream cannot continue from one."""
        if not self._has_state or self._randomness is None or self._randomness.has_drawn:
            return None
        reached, state = (samples, self._dataset.state_dict()) if samples == self.reached else self._marked
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return None
        return {"epoch": self._epoch, "samples": samples, "state": copy.deepcopy(state)} if reached == samples else None


def has_position(dataset: Any, num_workers: int) -> bool:
    """Return whether checkpoints keep the position of a stream that `num_workers` loader processes read."""
    return num_workers == 0 and has_state(dataset) and not has_shuffle_buffer(dataset)


def has_shuffle_buffer(dataset: Any) -> bool:
    """Return whether a Hugging Face stream shuffles, or may shuffle, through a buffer. Its state leaves the buffer out."""
    if not is_of_hugging_face(dataset):
        return False
    nodes = [getattr(dataset, "_ex_iterable", None)]
    while nodes:
        node = nodes.pop()
        if node is None or "BufferShuffled" in type(node).__name__:
            return True
        inner = getattr(node, "ex_iterable", None)
        nodes += [] if inner is None else [inner]
        nodes += list(getattr(node, "ex_iterables", ()))
    return False


class WholeBatches(ShardedData):
    """Yield one rank's own batches, each as one micro-batch (`DataLoader(batch_size=None)` with `data.presharded`)."""

    num_samples = None

    def __init__(self, source: Source, batch: BatchPlan, seed: int) -> None:
        self.batch, self._source, self._seed = batch, source, seed
        self._running: Iterator[UpdateBatch] | None = None

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Return all update batches of `epoch`. `skip` must be 0, because the caller skips update batches itself."""
        assert skip == 0
        self.close()
        self._running = self._update_batches(epoch)
        return self._running

    def close(self) -> None:
        """Stop the loader processes."""
        _finish(self._running)
        self._running = None

    def _update_batches(self, epoch: int) -> Iterator[UpdateBatch]:
        source = self._source
        assert source.loader is not None
        announce_epoch(source.dataset, epoch)
        arguments = loader_arguments(source, self._seed, epoch)
        if not is_stream(source.dataset):
            arguments["sampler"] = source.sampler
            announce_epoch(source.sampler, epoch)
            if source.sampler is None:
                count = sample_count(source.dataset, source.name)
                order = epoch_order(count, self._seed, epoch, source.shuffle, self.version)
                arguments["sampler"] = order if isinstance(order, ComputedOrder) else order.tolist()
        loader: DataLoader[Any] = DataLoader(
            source.dataset,
            batch_size=None,
            collate_fn=source.collate_fn,
            **arguments,
        )
        steps, position = self.batch.gradient_accumulation_steps, 0
        randomness = sample_rng.OwnStream(sample_seed(self._seed, epoch, 0, STREAM))
        for batches in _read_in_pieces(read_loader(loader), steps, 0, randomness):
            micro = [MicroBatch(pinned(source, batch), batch_length(batch, source.name)) for batch in batches]
            count = sum(each.num_samples for each in micro)
            yield UpdateBatch(micro, count, position)
            position += count


class PreshardedData(ShardedData):
    """Let ranks bring their own parts, which may be uneven.

    For every update they agree on the number of samples of each rank.

    A rank that has run out of data runs its last batch again with weight 0 until all ranks have run out. Each update batch of
    `epoch` is a collective.
    """

    num_samples = None

    def __init__(self, local: ShardedData, batch: BatchPlan, rank: int, name: str, reduce: Reduce) -> None:
        self.batch, self.has_own_cursor = batch, True
        self._local, self._rank, self._name, self._reduce = local, rank, name, reduce
        self._sought: Mapping[str, Any] = {}
        self._epoch, self._used = (
            0,
            dict[int, int](),
        )  # samples over all ranks -> samples of this rank, before the last update and now

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of `epoch` after `skip` global samples. Every rank must take all of them.

        A resume continues at the stored positions of the parts, or reads the used samples again if the checkpoint has none.
        """
        used, own = self._begin(epoch, skip)
        update_batches, last = self._local.epoch(epoch, own), None
        self._epoch, self._used = epoch, {used: own}
        while True:
            update_batch = next(update_batches, None)
            micro = update_batch.micro_batches if update_batch is not None else []
            mine = sum(each.num_samples for each in micro)
            samples, most = self._agree(mine, len(micro), is_first=used == 0)
            if samples == 0 or used >= (self.batch.max_samples or math.inf):
                return
            if not micro and last is None:  # this rank had run out of data before the resume
                last = next(self._local.epoch(epoch)).micro_batches[-1].batch
            last = _shallow(micro[-1].batch) if micro else last  # a copy, because a step may remove entries of a dict
            micro = micro + [MicroBatch(_shallow(last), 0) for _ in range(most - len(micro))]
            own += mine
            self._used = {used: self._used.get(used, 0), used + samples: own}
            if used >= skip:
                yield UpdateBatch(micro, samples, used)
            used += samples
            if used - samples < skip < used:
                raise ConfigError(
                    f"{self._name}: the checkpoint was saved after {skip} samples of the epoch, which is inside an update of this run:"
                    " resume presharded data with the same number of processes and batch size"
                )

    def cursor(self, samples: int) -> dict[str, Any] | None:
        """Return the number of samples of this rank among `samples`, and the position of its data."""
        own = self._used.get(samples)
        if own is None:
            return None
        return {"epoch": self._epoch, "samples": own, "data": self._local.cursor(own) if own else None}

    def seek(self, cursor: Mapping[str, Any] | None) -> None:
        """Let the next `epoch` begin at `cursor`."""
        self._sought = cursor or {}

    def _begin(self, epoch: int, skip: int) -> tuple[int, int]:
        """Return (samples over all ranks, samples of this rank) after which the epoch begins.

        Raises ConfigError if another number of ranks has used `skip` samples, because the parts then differ.
        """
        sought, self._sought = self._sought, {}
        ranks = sought.get("ranks", ())
        if not skip or not ranks or (sought.get("epoch"), sought.get("samples")) != (epoch, skip):
            return 0, 0
        world = self.batch.data_parallel_size
        if len(ranks) != world:
            raise ConfigError(
                f"{self._name}: the checkpoint was saved inside an epoch of presharded data that {len(ranks)} processes read, and"
                f" this run has {world}, whose parts differ: resume with {len(ranks)} processes, or from a checkpoint at the end of"
                " an epoch"
            )
        if isinstance(self._local, WholeBatches) or any(each is None for each in ranks):
            return 0, 0
        self._local.seek(ranks[self._rank]["data"])
        return skip, int(ranks[self._rank]["samples"])

    def use_version(self, version: int) -> None:
        """Read later epochs of this rank's part in the order of `version`."""
        self._local.use_version(version)

    def close(self) -> None:
        """Stop the loader processes."""
        self._local.close()

    def _agree(self, samples: int, micro_batches: int, *, is_first: bool) -> tuple[int, int]:
        """Return (samples of this update over all ranks, micro-batches that each rank must run). A collective."""
        world = self.batch.data_parallel_size
        counts = gather(self._reduce, self._rank, world, samples, micro_batches)
        if is_first and not all(count for count, _ in counts):
            empty = ", ".join(str(r) for r, (count, _) in enumerate(counts) if not count)
            raise ConfigError(f"{self._name}: rank {empty} has no sample at all: give every rank at least one")
        return sum(count for count, _ in counts), max(steps for _, steps in counts)


def _shallow(batch: Any) -> Any:
    return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)


def _read_in_pieces(
    items: Iterator[Any], size: int, skip: int, randomness: sample_rng.OwnStream
) -> Iterator[list[Any]]:
    """Yield lists of `size` items after the first `skip`.

    The last list may be shorter. The items draw from `randomness`.
    """
    with randomness:
        for _ in itertools.islice(items, skip):
            pass
    while True:
        with randomness:
            piece = list(itertools.islice(items, size))
        if not piece:
            return
        yield piece
        if len(piece) < size:
            return


def batch_length(batch: Any, name: str) -> int:
    """Return the number of samples in a collated batch: the first dimension of its first tensor or array."""
    found = _first_array(batch)
    if found is None:
        kind = type(batch).__name__
        raise ConfigError(f"{name}: a {kind} without tensors has no batch size: yield tensors, or samples")
    return int(found.shape[0])


def _first_array(batch: Any) -> Any:
    if getattr(batch, "shape", None):
        return batch
    if isinstance(batch, list | tuple):
        children = iter(batch)
    elif hasattr(batch, "values"):
        children = iter(batch.values())
    else:
        return None
    return next((found for child in children if (found := _first_array(child)) is not None), None)


def length_of(source: Source, batch: BatchPlan) -> int | None:
    if not hasattr(source.dataset, "__len__"):
        return None
    try:
        length = len(source.dataset)
    except (TypeError, NotImplementedError):  # for example a wrapper around a stream that has no length
        return None
    length -= length % batch.global_batch_size if source.drop_last else 0
    return min(length, batch.max_samples or length)


def _finish(update_batches: Iterator[UpdateBatch] | None) -> None:
    if update_batches is not None:
        update_batches.close()  # type: ignore[attr-defined] # a generator: its frame holds the loader's iterator


_NUMPY_HAS = {torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64}
_NUMPY_HAS |= {torch.uint8, torch.bool}


class _ByValue(pickle.Pickler):
    """Pickle tensors by value.

    Workaround (torch 2.13, pytorch/pytorch#11899; may go when torch sends many tensors with few descriptors): torch
    would use a file descriptor for each tensor, and an update may contain thousands of tensors.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_array(value):
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def _is_array(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dtype in _NUMPY_HAS
    )


def packed(samples: Any) -> bytes:
    """Return `samples` as bytes.

    Loader processes use this as their collate function, so they send samples that are not collated. The main process
    collates the samples, because it knows their positions.
    """
    buffer = io.BytesIO()
    _ByValue(buffer, pickle.HIGHEST_PROTOCOL).dump(samples)
    return buffer.getvalue()


def digest_of(value: Any, before: int = 0) -> int:
    """Return a checksum of nested numbers, strings and arrays. Any other object contributes only its type."""
    if isinstance(value, Mapping):
        return digest_of([*value.items()], before)
    if isinstance(value, list | tuple):
        for child in value:
            before = digest_of(child, before)
        return before
    if type(value) is torch.Tensor and _is_array(value):
        value = value.numpy()
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return zlib.crc32(value.tobytes(), before)
    word = repr(value) if isinstance(value, str | bytes | int | float) else type(value).__name__
    return zlib.crc32(word.encode(), before)
