"""The random numbers of one sample: independent streams that never change, set without seeding."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from distributed.backends import twisters
from distributed.backends._torch import sample_rng
from distributed.backends._torch.sample_rng import ALL, NUMPY, PYTHON, TORCH
from distributed.data import sample_seed, sample_seeds
from tests.unit.ranks import groups_of_ranks, plan

NUM_DRAWS = 1500  # more than the words of a generator
# What the generators draw first for sample 3 of epoch 2 with seed 1.
VERSION_1 = [0.6182488408379468], [0.9477168347796688], [0.9095524708709996]
VERSION_2 = [0.6182488408379468], [0.17287138156178605], [0.9095524708709996]


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    with sample_rng.preserved():
        yield


def draws(count: int = 1) -> tuple[list[float], list[float], list[float]]:
    """Return what each generator draws, in the order torch, Python, numpy."""
    of_torch = [torch.rand((), dtype=torch.float64).item() for _ in range(count)]
    return of_torch, [random.random() for _ in range(count)], [float(numpy.random.random()) for _ in range(count)]


def begun(value: int, which: int = ALL, version: int = 2) -> tuple[list[float], list[float], list[float]]:
    sample_rng.begin_sample(value, which, version)
    return draws(NUM_DRAWS)


def test_streams_never_change_between_versions() -> None:
    sample_rng.begin_sample(sample_seed(1, 2, 3), ALL, 1)
    assert draws() == VERSION_1
    sample_rng.begin_sample(sample_seed(1, 2, 3), ALL, 2)
    assert draws() == VERSION_2


def test_the_stream_of_a_generator_does_not_depend_on_what_else_is_begun_or_was_drawn() -> None:
    expected = begun(5)
    random.gauss(0, 1), numpy.random.randn(), torch.randn(1)  # each keeps a spare number
    for place, which in enumerate((TORCH, PYTHON, NUMPY)):
        before = draws()
        assert begun(5, which)[place] == expected[place]
        assert draws() != before
    spare = [random.gauss(0, 1), numpy.random.randn(), torch.randn(1).item()]
    sample_rng.begin_sample(6, ALL, 2)
    first = [random.gauss(0, 1), numpy.random.randn(), torch.randn(1).item()]
    random.gauss(0, 1), numpy.random.randn(), torch.randn(1)
    random.gauss(0, 1)
    sample_rng.begin_sample(6, ALL, 2)
    assert [random.gauss(0, 1), numpy.random.randn(), torch.randn(1).item()] == first != spare


def test_a_generator_that_is_not_begun_is_left_alone() -> None:
    for which in (TORCH, PYTHON, NUMPY):
        before = sample_rng.save()
        sample_rng.begin_sample(7, which, 2)
        assert sample_rng.drawn(before) == which


def test_the_public_ways_set_the_same_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = begun(2**64 - 1)
    with monkeypatch.context() as patch:
        patch.setattr(twisters, "_find", lambda bits: None)
        twisters._streams.cache_clear()
        assert twisters.memory() is None
        assert begun(2**64 - 1) == expected
    twisters._streams.cache_clear()


def test_streams_of_neighbours_and_of_the_three_generators_are_independent() -> None:
    first = []
    for value in sample_seeds(0, 0, range(4000)):
        sample_rng.begin_sample(value, ALL, 2)
        first.append([each for of_one in draws(2) for each in of_one])
    table = numpy.array(first)
    assert abs(table.mean(axis=0) - 0.5).max() < 0.02  # four standard errors
    correlations = numpy.corrcoef(numpy.hstack([table[1:], table[:-1]]).T) - numpy.eye(12)
    assert abs(correlations).max() < 0.08
    for column in table.T:
        counts, _ = numpy.histogram(column, bins=40, range=(0, 1))
        assert abs(((counts - 100) ** 2 / 100).sum() - 39) < 4 * 78**0.5


def test_the_bits_of_a_long_stream_are_balanced() -> None:
    for of_one in begun(9):
        words = (numpy.array(of_one) * 2**32).astype(numpy.uint64)
        ones = [(words >> numpy.uint64(bit) & numpy.uint64(1)).mean() for bit in range(32)]
        assert all(abs(share - 0.5) < 0.06 for share in ones)


class Augmented(Dataset[Any]):
    """Items with a number from each generator."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1), random.random(), numpy.random.random()


def test_a_run_keeps_the_streams_of_its_version_at_any_world_size() -> None:
    for version in (1, 2):
        expected: dict[int, Any] = {}
        for position in range(24):
            sample_rng.begin_sample(sample_seed(3, 1, position), ALL, version)
            expected[position] = [torch.rand(1).item(), random.random(), numpy.random.random()]
        for world in (1, 3):
            ranks = groups_of_ranks(
                Augmented(), plan(world, 6 // world), epoch=1, seed=3, shuffle=False, version=version
            )
            micros = [micro.batch for groups in ranks for group in groups for micro in group.micro_batches]
            rows = [row for batch in micros for row in zip(*(column.tolist() for column in batch), strict=True)]
            assert {index: [drawn[0], *rest] for index, drawn, *rest in rows} == expected
