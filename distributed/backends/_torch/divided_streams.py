"""Let each rank read only its part of a stream, in the order of one process."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from distributed.backends._torch import sample_rng
from distributed.backends._torch.fetching import STREAM, Fetcher, announce_epoch
from distributed.backends._torch.sources import Reduce, Source, gather, pinned
from distributed.backends._torch.stream_parts import OFF, Hook, Lane, PartInProcess, PartsInWorkers, States
from distributed.backends._torch.streams import CHUNK, digest_of, length_of
from distributed.backends.base import ShardedData
from distributed.config.plan import BatchPlan
from distributed.data import aligned_micro_batches, sample_seed
from distributed.errors import ConfigError
from distributed.state import MicroBatch, UpdateBatch

_MAX_WINDOW = 16  # updates for which the ranks agree at once on how many samples there are
_MAX_CHECKED = 16  # samples of the whole stream that are read to check the parts


class DividedStream(ShardedData):
    """Divide a stream by position: rank r of n ranks reads every n-th position, beginning r positions after the first one.

    Loader processes divide the part of their rank in the same way, so the order does not depend on their number either. If the
    global batch size is not a multiple of the number of ranks, each rank reads all positions.

    A rank does not see where the stream ends for the others. The ranks therefore agree on the number of samples of several
    updates, which they read ahead. A rank then holds at most as many samples as a global batch has.
    """

    def __init__(
        self, source: Source, batch: BatchPlan, rank: int, seed: int, hook: Hook, *, train: bool, reduce: Reduce
    ) -> None:
        """Prepare the stream. Not a collective."""
        world = batch.data_parallel_size
        self.batch, self.num_samples = batch, length_of(source, batch)
        self._source, self._rank, self._seed, self._hook, self._reduce = source, rank, seed, hook, reduce
        self.has_own_cursor = batch.global_batch_size % world == 0
        self._stride, self._offset = (world, rank) if self.has_own_cursor else (1, 0)
        self._fetcher = Fetcher(source.dataset, source.collate_fn, seed, train=train)
        self._running: Iterator[UpdateBatch] | None = None
        self._reader: PartInProcess | PartsInWorkers | None = None
        self._is_checked = world == 1
        self._epoch, self._marks = 0, dict[int, States]()  # samples -> the states there
        self._sought: Mapping[str, Any] = {}
        self._spare: list[Any] = []  # a sample that is run with weight 0 if this rank has none in a micro-batch

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Return the update batches of `epoch` after `skip` global samples. Each update batch is a collective."""
        self.close()
        self._running = self._update_batches(epoch, skip)
        return self._running

    def close(self) -> None:
        """Stop the loader processes."""
        if self._running is not None:
            self._running.close()  # type: ignore[attr-defined] # a generator
        if self._reader is not None:
            self._reader.close()
        self._running = self._reader = None

    def cursor(self, samples: int) -> dict[str, Any] | None:
        """Return the states of this rank's parts after `samples` samples, or None if the parts have no state."""
        states = self._marks.get(samples)
        return {"epoch": self._epoch, "samples": samples, "parts": states} if states else None

    def seek(self, cursor: Mapping[str, Any] | None) -> None:
        """Let the next `epoch` begin at the states in `cursor`, if these belong to the same parts."""
        self._sought = cursor or {}

    def _update_batches(self, epoch: int, skip: int) -> Iterator[UpdateBatch]:
        announce_epoch(self._source.dataset, epoch)
        expected = self._first_samples(epoch) if skip == 0 and not self._is_checked else None
        self._epoch, position = epoch, skip
        for piece, count in self._pieces(self._open(epoch, skip), skip, expected):
            if self._source.drop_last and count < self.batch.global_batch_size:
                break
            yield self._update_batch(epoch, position, piece, count)
            position += count
        if position == 0:
            kind = type(self._source.dataset).__name__
            raise ConfigError(f"{self._source.name}: {kind} yields no batch: give it samples")

    def _open(self, epoch: int, skip: int) -> PartInProcess | PartsInWorkers:
        """Return a reader of this rank's positions from `skip` on."""
        source, first, workers = self._source, skip + self._offset, self._source.num_workers
        states = self._states_at(epoch, skip)
        count = self._stride * max(1, workers)
        lanes = []
        for start in range(first, first + count, self._stride):
            index = start % count
            lanes.append(Lane(
                source.dataset, self._hook, source.name, index, count, start // count, epoch, sample_seed(self._seed, epoch, 0, STREAM),
                states.get((index, count)),
            ))  # fmt: skip
        assert source.loader is not None or not workers
        self._marks = {skip: [[lane.index, lane.count, *lane.sought] for lane in lanes if lane.sought is not None]}
        size = source.loader.batch_size if source.loader is not None else None
        self._reader = (
            PartsInWorkers(lanes, source, size if size and size > 1 else CHUNK) if workers else PartInProcess(lanes[0])
        )
        return self._reader

    def _states_at(self, epoch: int, skip: int) -> dict[tuple[int, int], tuple[int, Any]]:
        """Return (index, count) of each part -> (samples, state), if the cursor belongs to sample `skip` of `epoch`."""
        sought, self._sought = self._sought, {}
        if (sought.get("epoch"), sought.get("samples")) != (epoch, skip):
            return {}
        parts = [part for each in sought.get("ranks", [sought]) if each is not None for part in each.get("parts", ())]
        return {(index, count): (at, state) for index, count, at, state in parts}

    def _pieces(
        self, reader: PartInProcess | PartsInWorkers, skip: int, expected: list[Any] | None
    ) -> Iterator[tuple[list[Any], int]]:
        """Yield (this rank's samples, number of samples over all ranks) of each update."""
        size, total = 1, self.batch.global_batch_size
        left = self.batch.max_samples - skip if self.batch.max_samples else math.inf
        while left > 0:
            pieces, states = self._read(reader, size, left)
            compared = None if expected is None else self._compared(pieces, expected)
            count = self._agree(reader, sum(map(len, pieces)), skip, compared)
            expected = None
            starts = range(skip, skip + count, total)
            ends = [*starts[1:], skip + count]
            # The last update that was given out may not have been used.
            self._marks = {skip: self._marks.get(skip, []), **dict(zip(ends, states, strict=False))}
            for number, (start, end) in enumerate(zip(starts, ends, strict=False)):
                yield pieces[number] if number < len(pieces) else [], end - start
            if count < min(size * total, left):
                return
            skip, left = skip + count, left - count
            size = min(2 * size, self._stride, _MAX_WINDOW)

    def _read(
        self, reader: PartInProcess | PartsInWorkers, size: int, left: float
    ) -> tuple[list[list[Any]], list[States]]:
        """Return this rank's samples of the next `size` updates, and the states after each update."""
        pieces: list[list[Any]] = []
        states: list[States] = []
        for _ in range(size):
            count = int(min(self.batch.global_batch_size, left))
            wanted = len(range(self._offset, count, self._stride))
            pieces.append(reader.take(wanted))
            states.append(reader.states())
            left -= count
            if len(pieces[-1]) < wanted or left <= 0:
                break
        self._spare = next((piece[:1] for piece in reversed(pieces) if piece), self._spare)
        return pieces, states

    def _agree(
        self, reader: PartInProcess | PartsInWorkers, count: int, position: int, compared: tuple[int, str | None] | None
    ) -> int:
        """Return the number of samples that all ranks have read. A collective. Raises ConfigError if the parts do not fit together.

        `compared` is the result of `_compared` for the first samples of an epoch.
        """
        name, (digest, fault) = self._source.name, compared or (0, None)
        fault = fault or reader.fault
        values = count, int(fault is not None), digest
        found = [list(values)]
        if self._stride > 1 or compared:
            found = gather(self._reduce, self._rank, self.batch.data_parallel_size, *values)
        if any(each[2] != digest for each in found):
            raise ConfigError(
                f"{name}: the ranks have different streams, but each takes its part of the same one: give every rank the whole"
                " stream, or set data.presharded=true"
            )
        if any(each[1] for each in found):
            at = next(rank for rank, each in enumerate(found) if each[1])
            what = fault or f"rank {at} has found that the parts of shard(index, count) are wrong"
            error = ConfigError(f"{name}: {what}: part i yields the samples i, i + count, ... of the stream, or {OFF}")
            error.is_echo = fault is None
            raise error
        if self._stride == 1:
            return count
        counts = [each[0] for each in found]
        total = sum(counts)
        if any(each != len(range(rank, total, self._stride)) for rank, each in enumerate(counts)):
            shown = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(counts))
            raise ConfigError(
                f"{name}: shard(index, count) returns parts of unequal length (from sample {position} on, {shown}): part i yields the"
                f" samples i, i + count, ... of the stream, or {OFF}"
            )
        return total

    def _update_batch(self, epoch: int, position: int, piece: list[Any], count: int) -> UpdateBatch:
        world, micro_batches = self.batch.data_parallel_size, []
        for part in aligned_micro_batches(count, self.batch):
            where = range(part.start + self._rank, max(part.stop, part.start + self._rank), world)
            own = piece[slice(where.start, part.stop, world)]
            if self._stride > 1:
                own = piece[part.start // world : part.start // world + len(where)]
            at = position + (where.start if where else 0)
            batch = self._fetcher.collate(epoch, at, own or self._any_sample(epoch))
            micro_batches.append(MicroBatch(pinned(self._source, batch), len(where)))
        return UpdateBatch(micro_batches, count, position)

    def _any_sample(self, epoch: int) -> list[Any]:
        """Return a sample for a rank that has none in a micro-batch."""
        if not self._spare:
            self._spare = self._whole(epoch, 1)
        return self._spare

    def _whole(self, epoch: int, count: int) -> list[Any]:
        """Return the first samples of the whole stream. A copy is read, because the data set may keep its position in itself."""
        with sample_rng.OwnStream(sample_seed(self._seed, epoch, 0, STREAM)):
            return list(itertools.islice(iter(copy.copy(self._source.dataset)), count))

    def _first_samples(self, epoch: int) -> list[Any]:
        """Return the first samples of the whole stream, to compare them with those of this rank."""
        self._is_checked = True
        return self._whole(epoch, min(self._offset + self._stride + 1, _MAX_CHECKED))

    def _compared(self, pieces: list[list[Any]], whole: list[Any]) -> tuple[int, str | None]:
        """Return (checksum of the first sample of the stream, what is wrong with the first samples of this rank)."""
        own = list(itertools.islice(itertools.chain.from_iterable(pieces), 2))
        fault = None
        for number, (at, sample) in enumerate(zip(range(self._offset, len(whole), self._stride), own, strict=False)):
            if digest_of(sample) != digest_of(whole[at]):
                part = f"shard({self._offset}, {self._stride})"
                fault = fault or f"sample {number} of {part} is not sample {at} of the stream"
        return digest_of(whole[0]) & 0xFFFFFF if whole else 0, fault  # a number that float32 can represent exactly
