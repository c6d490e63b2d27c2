"""The order of samples as a pure function of (seed, epoch, position), cut over ranks; how an engine reads data belongs in `backends`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from distributed.config.plan import BatchPlan

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def epoch_order(num_samples: int, seed: int, epoch: int, shuffle: bool) -> NDArray[numpy.int64]:
    """Return the sample index at each position of an epoch, an integer array of shape `[num_samples]`.

    The result is the same on every rank, machine and numpy version, because the stream of RandomState is frozen (NEP
    19). Without `shuffle` it is 0, 1, 2, ...

    Args:
        num_samples: the length of the data set.
        seed: the seed of the run.
        epoch: the epoch, from 0. Each epoch has its own order.
        shuffle: whether to shuffle.
    """
    import numpy

    if not shuffle:
        return numpy.arange(num_samples, dtype=numpy.int64)
    key = numpy.random.SeedSequence((seed, epoch)).generate_state(8)
    order: NDArray[numpy.int64] = numpy.random.RandomState(key).permutation(num_samples).astype(numpy.int64, copy=False)
    return order


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


def sample_seed(seed: int, epoch: int, position: int, salt: int = 0) -> int:
    """Return the 64-bit seed of the sample at `position` of `epoch`. `salt` separates training, validation and so on.

    The four numbers are mixed one after the other with the mixing function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    state = 0
    for word in (seed ^ (seed >> 64), epoch, position, salt):
        state = (state + _GOLDEN + word) & _WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
        state ^= state >> 31
    return state
