"""The order of samples as a pure function of (seed, epoch, position), cut over ranks; how an engine reads data belongs in `backends`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from distributed.state import DATA_VERSION

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from distributed.config.plan import BatchPlan

MAX_TABLE = 1 << 16  # samples up to which an order is an array
_AHEAD = 1 << 12  # positions at which an order is computed together
_ROUNDS = 10
_WORD = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # constants of SplitMix64


def epoch_order(
    num_samples: int, seed: int, epoch: int, shuffle: bool, version: int = DATA_VERSION
) -> NDArray[numpy.int64] | ComputedOrder:
    """Return the order of an epoch: the sample index at each position. A slice such as `order[8:16]` is an array of shape `[8]`.

    The result is the same on every rank, machine and numpy version, because the streams of SeedSequence and RandomState
    are frozen (NEP 19). Without `shuffle` it is 0, 1, 2, ... An order of at most `MAX_TABLE` samples is an array, which is
    shuffled. A longer order is computed only at the positions that are read.

    Args:
        num_samples: the length of the data set.
        seed: the seed of the run.
        epoch: the epoch, from 0. Each epoch has its own order.
        shuffle: whether to shuffle.
        version: the version of the order (`TrainState.data_version`). In version 1, every shuffled order is an array. The orders of
            versions 2 and 3 are equal.

    Returns:
        An array of shape `[num_samples]`, or an object that has a length, slices and an iterator as such an array has.
    """
    import numpy

    if not shuffle:
        in_order = ComputedOrder(num_samples, lambda positions: positions)
        return numpy.arange(num_samples, dtype=numpy.int64) if num_samples <= MAX_TABLE else in_order
    if version > 1 and num_samples > MAX_TABLE:
        return ComputedOrder(num_samples, Permutation(num_samples, seed, epoch))
    key = numpy.random.SeedSequence((seed, epoch)).generate_state(8)
    order: NDArray[numpy.int64] = numpy.random.RandomState(key).permutation(num_samples).astype(numpy.int64, copy=False)
    return order


class ComputedOrder:
    """The order of a large data set. It takes the same time and memory at any number of samples and at any position.

    Args:
        num_samples: the length of the data set.
        at: returns the sample indices at an array of positions.
    """

    def __init__(self, num_samples: int, at: Callable[[NDArray[numpy.int64]], NDArray[numpy.int64]]) -> None:
        self._num_samples, self._at = num_samples, at
        self._known, self._values = range(0), _positions(range(0))  # positions, and the indices at them
        self._next = -1  # position after those that were asked for last

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, where: slice) -> NDArray[numpy.int64]:
        wanted = range(*where.indices(self._num_samples))
        if not wanted:
            return self._at(_positions(wanted))
        if wanted.step % self._known.step or wanted[0] not in self._known or wanted[-1] not in self._known:
            self._read(wanted)
        self._next = wanted[-1] + wanted.step
        first, step = self._known.index(wanted[0]), wanted.step // self._known.step
        found: NDArray[numpy.int64] = self._values[first : first + len(wanted) * step : step]
        return found

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._num_samples, _AHEAD):
            yield from self[start : start + _AHEAD].tolist()

    def _read(self, wanted: range) -> None:
        """Compute the indices at `wanted`, together with those that will probably be read next.

        A rank reads few positions at a time, and the overhead of each numpy call would then take most of the time. The slices
        of a rank either follow each other directly, or with gaps whose lengths differ from their steps.
        """
        follows, is_short = wanted[0] == self._next, wanted[-1] - wanted[0] < _AHEAD
        step = 1 if is_short and not follows else wanted.step
        count = max(len(wanted), _AHEAD if is_short or follows else 0)
        self._known = range(wanted[0], min(wanted[0] + count * step, self._num_samples), step)
        self._values = self._at(_positions(self._known))


class Permutation:
    """Permutation of `range(num_samples)` that is computed position by position.

    This is the generalized Feistel cipher of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002) over the
    smallest domain a x b with a = ceil(sqrt(num_samples)) and a * b >= num_samples. A result outside of the range is enciphered
    again until it is inside (cycle walking, ibid.); fewer than 1 in a of the results are outside. There are ten rounds, as in
    NIST's FF1. Their functions are keyed by (seed, epoch) and mix with SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), so the
    permutation is statistically random but not secret.

    Args:
        num_samples: the length of the range, from 1 to 2**63.
        seed: the seed of the run.
        epoch: the epoch, from 0.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        import numpy

        self._num_samples = num_samples
        root = math.isqrt(num_samples - 1) + 1  # rounded up
        self._a, self._b = numpy.uint64(root), numpy.uint64(-(-num_samples // root))
        self._keys = numpy.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, numpy.uint64)

    def __call__(self, positions: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        """Return the image of each of `positions`, an array `[any]` of numbers of the range."""
        import numpy

        values = self._enciphered(positions.astype(numpy.uint64))
        while (outside := values >= self._num_samples).any():
            values[outside] = self._enciphered(values[outside])
        return values.astype(numpy.int64)

    def _enciphered(self, values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        left: Any = values // self._b
        right: Any = values % self._b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _drawn(left + key, self._b)) % self._b
            else:
                left = (left + _drawn(right + key, self._a)) % self._a
        enciphered: NDArray[numpy.uint64] = left * self._b + right
        return enciphered


def _positions(where: range) -> NDArray[numpy.int64]:
    import numpy

    return numpy.arange(where.start, where.stop, where.step, dtype=numpy.int64)


def _drawn(words: Any, limit: numpy.uint64) -> Any:
    """Return a pseudo-random number below `limit`, which is below 2**32, for each word."""
    words = (words ^ (words >> 30)) * _MIX_1
    words = (words ^ (words >> 27)) * _MIX_2
    return (words >> 32) * limit >> 32


def num_micro_batches(num_samples: int, batch: BatchPlan) -> int:
    """Return the number of micro-batches in an update of `num_samples` global samples. A short update has fewer."""
    if num_samples == batch.global_batch_size:
        return batch.gradient_accumulation_steps
    return max(1, -(-num_samples // (batch.batch_size * batch.data_parallel_size)))


def slices(num_samples: int, batch: BatchPlan, rank: int, micro_batches: int | None = None) -> list[range]:
    """Return the samples of one update that `rank` takes: for each micro-batch, one range of positions in the update.

    A micro-batch is a contiguous part of the update, and rank r takes every `data_parallel_size`-th sample of it from r
    on, as `DistributedSampler` does. The slices of all ranks differ by at most one sample, larger ones first. Every
    rank gets the same number of ranges; some are empty if there are fewer samples than slices.

    Args:
        num_samples: global samples of the update.
        batch: the batch equation of the run.
        rank: the data-parallel rank.
        micro_batches: the number of micro-batches; by default `num_micro_batches`.

    Returns:
        One range for each micro-batch. Its numbers are positions in the update, from 0.
    """
    world = batch.data_parallel_size
    count = num_micro_batches(num_samples, batch) if micro_batches is None else micro_batches
    size, bigger = divmod(num_samples, count * world)
    cut, start = [], 0
    for j in range(count):
        stop = start + size * world + min(max(bigger - j * world, 0), world)
        cut.append(range(start + rank, max(stop, start + rank), world))
        start = stop
    return cut


def aligned_micro_batches(num_samples: int, batch: BatchPlan) -> list[range]:
    """Return the positions of one update's samples in each of its micro-batches. Each begins at a multiple of `data_parallel_size`.

    Rank r takes every `data_parallel_size`-th sample of a micro-batch from r on. So in an update it takes each position p with
    `p % data_parallel_size == r`. In a full update whose size is divisible by the number of ranks, these are the `slices`. The
    sizes of the micro-batches differ by at most one sample for each rank.

    Args:
        num_samples: global samples of the update.
        batch: the batch equation of the run.
    """
    world = batch.data_parallel_size
    count = num_micro_batches(num_samples, batch)
    size, bigger = divmod(num_samples // world, count)
    starts = [world * (j * size + min(j, bigger)) for j in range(count)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], num_samples], strict=True)]


def sample_seed(seed: int, epoch: int, position: int, salt: int = 0) -> int:
    """Return the 64-bit seed of the sample at `position` of `epoch`. `salt` separates training, validation and so on.

    The four numbers are mixed one after the other with the mixing function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    return _mixed(_mixed(_of_epoch(seed, epoch), position), salt)


def sample_seeds(seed: int, epoch: int, positions: Sequence[int], salt: int = 0) -> list[int]:
    """Return what `sample_seed` returns at each of `positions`, in a fraction of the time."""
    import numpy

    words = numpy.asarray(positions, numpy.uint64)
    for added in (_of_epoch(seed, epoch), salt):
        words = words + ((_GOLDEN + added) & _WORD)
        _mix(words)
    seeds: list[int] = words.tolist()
    return seeds


def sample_words(seeds: Sequence[int], where: range) -> NDArray[numpy.uint64]:
    """Return the numbers at the positions `where` of the SplitMix64 streams of `seeds`, an array `[seeds, positions]`.

    They never change between versions.
    """
    import numpy

    steps = numpy.arange(where.start + 1, where.stop + 1, dtype=numpy.uint64) * _GOLDEN
    words = numpy.asarray(seeds, numpy.uint64)[:, None] + steps
    _mix(words)
    return words


def _mix(words: NDArray[numpy.uint64]) -> None:
    """Mix each of `words` in place, as `_mixed` does. Its masks would take half of the time, and an array needs none."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        words ^= words >> shift
        words *= factor
    words ^= words >> 31


def _of_epoch(seed: int, epoch: int) -> int:
    return _mixed(_mixed(0, seed ^ (seed >> 64)), epoch)


def _mixed(state: int, word: int) -> int:
    """Mix `word` into `state`."""
    state = (((state + _GOLDEN) & _WORD) + word) & _WORD
    state = ((state ^ (state >> 30)) * _MIX_1) & _WORD
    state = ((state ^ (state >> 27)) * _MIX_2) & _WORD
    return state ^ (state >> 31)
