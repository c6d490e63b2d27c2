"""The order of samples and how updates are cut: properties over many sizes, without a framework."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy
import pytest

from distributed.config.plan import BatchPlan
from distributed.data import epoch_order, num_micro_batches, sample_seed, sample_seeds, slices

SIZES = [(world, steps, size) for world in (1, 2, 3, 4) for steps in (1, 2, 3) for size in (1, 2, 5)]


def plan(world: int, steps: int, size: int, short_of: int = 0) -> BatchPlan:
    return BatchPlan(size, steps, world, world * steps * size - short_of)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 97, 1000])
def test_each_epoch_is_a_permutation(num_samples: int) -> None:
    for seed, epoch in itertools.product((0, 3, 2**70), (0, 1, 9)):
        order = epoch_order(num_samples, seed, epoch, shuffle=True)
        assert order.dtype == numpy.int64
        assert sorted(order.tolist()) == list(range(num_samples))


def test_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = epoch_order(100, 1, 1, shuffle=True).tolist()
    numpy.random.rand(3)
    assert epoch_order(100, 1, 1, shuffle=True).tolist() == first
    others = [epoch_order(100, *key, shuffle=True).tolist() for key in ((1, 2), (2, 1), (0, 1), (1, 0))]
    assert all(other != first for other in others)


def test_order_never_changes_between_versions() -> None:
    assert epoch_order(10, 0, 0, shuffle=True).tolist() == [7, 4, 2, 9, 1, 8, 3, 6, 0, 5]
    assert epoch_order(10, 7, 3, shuffle=True).tolist() == [9, 7, 8, 1, 4, 5, 0, 6, 3, 2]


def test_order_is_sequential_without_shuffle() -> None:
    assert epoch_order(5, 1, 1, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("world", "steps", "size"), SIZES)
def test_slices_are_disjoint_complete_and_even(world: int, steps: int, size: int) -> None:
    for short_of in range(min(world * steps, world * steps * size)):
        batch = plan(world, steps, size, short_of)
        for count in range(1, batch.global_batch_size + 1):
            cut = [slices(count, batch, rank) for rank in range(world)]
            assert len({len(each) for each in cut}) == 1
            taken = [place for each in cut for places in each for place in places]
            assert sorted(taken) == list(range(count))
            sizes = [len(cut[rank][j]) for j in range(len(cut[0])) for rank in range(world)]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)
            assert max(sizes) <= size


@pytest.mark.parametrize(("world", "steps", "size"), SIZES)
def test_micro_batches_are_contiguous_runs(world: int, steps: int, size: int) -> None:
    batch = plan(world, steps, size)
    for count in range(1, batch.global_batch_size + 1):
        cut = [slices(count, batch, rank) for rank in range(world)]
        runs = [sorted(place for each in cut for place in each[j]) for j in range(len(cut[0]))]
        assert list(itertools.chain(*runs)) == list(range(count))


@pytest.mark.parametrize(("world", "steps", "size"), SIZES)
def test_full_updates_equal_what_a_distributed_sampler_gives(world: int, steps: int, size: int) -> None:
    batch, updates = plan(world, steps, size), 3
    total = updates * batch.global_batch_size
    for rank in range(world):
        theirs = list(range(rank, total, world))  # DistributedSampler(shuffle=False)
        by_hand = [theirs[i : i + size] for i in range(0, len(theirs), size)]
        starts = range(0, total, batch.global_batch_size)
        ours = [[start + i for i in cut] for start in starts for cut in slices(batch.global_batch_size, batch, rank)]
        assert ours == by_hand


def test_short_update_needs_fewer_micro_batches_and_an_uneven_full_one_does_not() -> None:
    assert num_micro_batches(9, BatchPlan(4, 4, 2, 32)) == 2
    assert num_micro_batches(8, BatchPlan(4, 4, 2, 32)) == 1
    assert num_micro_batches(5, BatchPlan(2, 2, 2, 5)) == 2


def test_sample_seeds_are_distinct_and_well_mixed() -> None:
    keys = list(itertools.product((0, 1), range(3), range(3000), range(2)))
    seeds = [sample_seed(*key) for key in keys]
    assert all(0 <= each < 2**64 for each in seeds)
    for low in (0, 32):  # either half seeds a generator of its own
        assert len({each >> low & 0xFFFFFFFF for each in seeds}) > 0.999 * len(keys)
    ones = [sum(each >> bit & 1 for each in seeds) / len(seeds) for bit in range(64)]
    assert all(0.48 < share < 0.52 for share in ones)
    assert sample_seed(2**64, 0, 0) != sample_seed(0, 0, 0)


def test_sample_seed_never_changes_between_versions() -> None:
    assert sample_seed(0, 0, 0) == 0x2130748AAAC80268
    assert sample_seed(1, 2, 3, 4) == 0x336C3255CBCC01FE


@pytest.mark.parametrize(("seed", "epoch", "salt"), [(0, 0, 0), (-3, 7, 5), (2**64 - 1, 2**40, 1), (2**70 + 5, 3, 2)])
def test_the_seeds_of_many_samples_are_those_of_each(seed: int, epoch: int, salt: int) -> None:
    positions = [0, 1, 5, 2**31, 2**40 + 1, 10**18]
    assert sample_seeds(seed, epoch, positions, salt) == [sample_seed(seed, epoch, each, salt) for each in positions]
    assert sample_seeds(seed, epoch, [], salt) == []


def test_importing_the_order_loads_no_numpy() -> None:
    code = "import sys, distributed.data; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
