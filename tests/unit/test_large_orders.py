"""Orders of data sets that are too large for a table: computed by position, and those that runs of earlier versions keep."""

from __future__ import annotations

import functools
import itertools
import json
import random
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from distributed import Trainer
from distributed.checkpoints import state_file
from distributed.data import MAX_TABLE, ComputedOrder, Permutation, epoch_order
from distributed.state import TrainState
from distributed.training import session
from distributed.training.files import _Taken
from tests.unit.ranks import groups_of_ranks, plan, samples_used, sharded

MANY = 100_000_000
COUNT = MAX_TABLE + 4464  # 70000


class Positions(Dataset[Any]):
    """Many items. Item i is the number i."""

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        return index


def whole(num_samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return Permutation(num_samples, seed, epoch)(numpy.arange(num_samples)).tolist()


def test_each_sample_comes_exactly_once() -> None:
    for count in [*range(1, 301), MAX_TABLE, MAX_TABLE + 1, 316**2, 316**2 + 1]:
        assert sorted(whole(count, seed=count % 3, epoch=count % 7)) == list(range(count)), count


def test_no_sample_of_a_large_data_set_comes_twice() -> None:
    draw = numpy.random.default_rng(0)
    for bits in range(20, 63, 3):
        count = int(draw.integers(1 << bits, 2 << bits, dtype=numpy.uint64))
        positions = numpy.unique(draw.integers(0, count, 20_000))
        found = Permutation(count, bits, 1)(positions)
        assert found.min() >= 0 and found.max() < count
        assert len(numpy.unique(found)) == len(positions)


def is_uniform(counts: numpy.ndarray, degrees: int) -> bool:
    """Return whether chi-square is within four standard deviations, in the normal approximation of Wilson and Hilferty."""
    expected = counts.sum() / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return abs((chi_square / degrees) ** (1 / 3) - (1 - spread)) < 4 * spread**0.5


@pytest.mark.parametrize("count", [2, 3, 5, 16, 17])
def test_over_a_thousand_seeds_each_sample_is_anywhere_and_beside_any_other(count: int) -> None:
    places, pairs = numpy.zeros((count, count)), numpy.zeros((count, count))
    for seed in range(1000):
        order = whole(count, seed, epoch=seed % 3)
        places[numpy.arange(count), order] += 1
        pairs[order[:-1], order[1:]] += 1
    assert is_uniform(places, (count - 1) ** 2)
    others = pairs[~numpy.eye(count, dtype=bool)]
    assert pairs.trace() == 0
    assert count < 5 or is_uniform(others, (count - 1) ** 2)  # fewer samples have too few orders for chi-square


def test_all_orders_of_four_samples_are_equally_frequent() -> None:
    found = Counter(tuple(whole(4, seed)) for seed in range(2400))
    assert len(found) == 24
    assert is_uniform(numpy.array([*found.values()]), 23)


def test_neighbours_of_a_large_order_are_as_far_apart_as_random_ones() -> None:
    order = Permutation(MANY, 0, 0)(numpy.arange(200_000)) / MANY
    for lag in (1, 2, 10_000):  # ten thousand positions have the same left half
        counts, _, _ = numpy.histogram2d(order[:-lag], order[lag:], bins=20, range=((0, 1), (0, 1)))
        assert is_uniform(counts, 399)


def test_orders_of_other_seeds_and_epochs_have_nothing_in_common() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 0)]
    firsts = [epoch_order(MANY, *key, shuffle=True)[:1000].tolist() for key in keys]
    for one, other in itertools.combinations(firsts, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) == 0


def test_orders_never_change_between_versions() -> None:
    assert epoch_order(MANY, 0, 0, shuffle=True)[:5].tolist() == [77683759, 27162202, 72345094, 624117, 66005580]
    before = epoch_order(COUNT, 0, 0, shuffle=True, version=1)[:6].tolist()
    assert before == [28645, 5793, 67558, 15931, 31259, 48751]
    before = epoch_order(COUNT, 7, 3, shuffle=True, version=1)[COUNT - 3 :].tolist()
    assert before == [51870, 59145, 11977]


def test_a_small_order_is_the_same_in_every_version() -> None:
    for count in (10, MAX_TABLE):
        orders = [epoch_order(count, 1, 2, shuffle=True, version=version)[:].tolist() for version in (1, 2)]
        assert orders[0] == orders[1]


def test_any_slices_in_any_sequence_are_those_of_the_whole_order() -> None:
    everything, order = numpy.array(whole(COUNT)), epoch_order(COUNT, 0, 0, shuffle=True)
    assert isinstance(order, ComputedOrder) and len(order) == COUNT
    assert list(order) == everything.tolist()
    draw, after = random.Random(0), 0
    for _ in range(2000):
        step, size = draw.choice((1, 2, 3, 7, 100)), draw.choice((0, 1, 5, 40, 6000))
        start = after if draw.random() < 0.7 else draw.randrange(COUNT)
        assert (order[start : start + size : step] == everything[start : start + size : step]).all()
        after = range(start, max(start + size, start + 1), step)[-1] + step


def test_without_shuffle_a_large_order_is_sequential() -> None:
    order = epoch_order(MANY, 1, 1, shuffle=False)
    assert order[90_000_000:90_000_009:4].tolist() == [90_000_000, 90_000_004, 90_000_008]


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_first_batch_and_a_late_resume_take_little_time_and_memory(shuffle: bool) -> None:
    agreed = {f"{rank}.0": float(MANY) for rank in range(2)}
    data = sharded(Positions(), plan(2, 32), 1, lambda sums: agreed, shuffle=shuffle)
    tracemalloc.start()
    started = time.perf_counter()
    try:
        for skip in (0, 90_000_000 // 64 * 64):
            update_batch = next(data.epoch(3, skip))
            assert update_batch.position == skip and len(update_batch.micro_batches[0].batch) == 32
        assert time.perf_counter() - started < 1
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
        data.close()


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(("world", "size", "total"), [(1, 7000, 7000), (3, 1000, 7000), (2, 1250, 7000)])
def test_the_global_batches_are_those_of_the_order(version: int, world: int, size: int, total: int) -> None:
    batch = plan(world, size, -(-total // (world * size)), total)
    data = TensorDataset(torch.arange(COUNT))
    order = epoch_order(COUNT, 3, 1, shuffle=True, version=version)[:].tolist()
    for dataset, expected in (data, order), (Subset(data, range(COUNT - 1, -1, -1)), [COUNT - 1 - i for i in order]):
        ranks = groups_of_ranks(dataset, batch, epoch=1, skip=35_000, seed=3, version=version)
        found = [sorted(each) for each in samples_used(ranks, lambda columns: columns[0].tolist())]
        assert found == [sorted(expected[i : i + total]) for i in range(35_000, COUNT, total)]


def test_a_run_of_an_earlier_version_keeps_its_order_and_a_new_one_has_the_new_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Taken, "first", None)
    data = TensorDataset(torch.arange(COUNT), torch.zeros(COUNT, 1))
    seen: list[int] = []

    def step(model: Any, batch: Any) -> Any:
        seen.extend(batch[0].tolist())
        return model(batch[1]).mean()

    def trainer(**settings: Any) -> Trainer:
        seen.clear()
        return Trainer(torch.nn.Linear(1, 1), training_step=step, batch_size=20_000, device="cpu", **settings)

    def orders(version: int, epochs: int) -> list[int]:
        return [
            i
            for epoch in range(epochs)
            for i in epoch_order(COUNT, 0, epoch, shuffle=True, version=version)[:].tolist()
        ]

    with monkeypatch.context() as earlier:  # in which there was one order, and no checkpoint named it
        earlier.setattr(session, "TrainState", functools.partial(TrainState, data_version=1))
        to_json = state_file.to_json
        earlier.setattr(
            state_file, "to_json", lambda state: {k: v for k, v in to_json(state).items() if k != "data_version"}
        )
        old = trainer(max_steps=2).fit(data).run_dir
        used = list(seen)
    state = json.loads(next(Path(old).glob("checkpoints/*/state.json")).read_text())
    assert "data_version" not in state["train"]

    resumed = trainer(epochs=2, resume_from_checkpoint=old)
    run = resumed.fit(data).run_dir
    resumed.fit(data, epochs=1)
    assert used + seen == orders(1, 3)

    again = trainer(epochs=4, resume_from_checkpoint=run)  # its checkpoints name the order
    again.fit(data)
    assert orders(1, 3) + seen == orders(1, 4)

    trainer(epochs=2).fit(data)
    assert seen == orders(2, 2)


class Drawing(Dataset[Any]):
    """Samples that are random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), numpy.random.rand()])


def test_a_run_of_an_earlier_version_keeps_the_random_numbers_of_its_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[list[float]] = []

    def step(model: Any, batch: Any) -> Any:
        seen.extend(batch.tolist())
        return model(batch).mean()

    def fitted(**settings: Any) -> tuple[Path, list[list[float]]]:
        seen.clear()
        trainer = Trainer(torch.nn.Linear(2, 1), training_step=step, batch_size=4, device="cpu", epochs=2, **settings)
        return trainer.fit(Drawing()).run_dir, list(seen)

    with monkeypatch.context() as earlier:
        earlier.setattr(session, "TrainState", functools.partial(TrainState, data_version=2))
        _, whole = fitted()
        run, first = fitted(max_steps=1)
    assert first == whole[:4]
    assert first + fitted(resume_from_checkpoint=run)[1] == whole
    assert fitted()[1] != whole
