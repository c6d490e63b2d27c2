"""Plain metric functions that are no means are found in any evaluation and in training, at any number of ranks."""

from __future__ import annotations

import json

import pytest
import torch

from distributed.backends import checking, measured
from distributed.backends._torch import averages
from distributed.backends._torch.averages import Averages
from distributed.backends._torch.objective import Loss
from distributed.backends._torch.over_all import ENGINE, alone
from distributed.backends.over_all import Wholes
from distributed.state import MicroBatch, UpdateBatch
from distributed.training.validation import add, means_of
from tests.unit.ranks import on_ranks
from tests.unit.test_over_all import Ranks

N = 203
X = torch.randn(N, generator=torch.Generator().manual_seed(0))
Y = (X + torch.randn(N, generator=torch.Generator().manual_seed(1)) > 0.3).long()
ORDER = torch.argsort(Y, descending=True)  # all positives first


def scores(bias):
    return torch.stack([torch.zeros(N), X + bias], 1)


def precision(outputs, targets):
    found = outputs.argmax(1)
    return ((found == 1) & (targets == 1)).sum() / (found == 1).sum()


def recall(outputs, targets):
    return ((outputs.argmax(1) == 1) & (targets == 1)).sum() / (targets == 1).sum().clamp(min=1)


def f1(outputs, targets):
    found = outputs.argmax(1)
    return 2 * ((found == 1) & (targets == 1)).sum() / ((found == 1).sum() + (targets == 1).sum()).clamp(min=1)


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


class Rank:
    """Measures as the loop does, with outputs that are given."""

    def __init__(self, rank, world, reduce, functions, said):
        self.rank, self.world, self.ranks = rank, world, Ranks(rank, world, reduce)
        self.wholes = Wholes(
            ENGINE, self.ranks, is_presharded=False, warn=lambda text: None, keeping_generators=alone
        )  # fmt: skip
        self.averages = Averages(
            functions, torch.device("cpu"), wholes=self.wholes, notice=said.append if rank == 0 else lambda text: None
        )
        self.num_passes = 0

    def _step(self, split, outputs, targets, start, size):
        places = list(range(start + self.rank, min(start + size, len(targets)), self.world))
        loss = Loss(torch.zeros(()), None, outputs[places or [0]], targets[places or [0]])
        micro = MicroBatch(None, len(places))
        if split == "val":
            return self.averages.of_evaluation(micro, loss)
        return self.averages.of_training([micro], [loss], UpdateBatch([], min(size, len(targets) - start), start))

    def _measure(self, split, sums, is_end=True):
        return self.averages.measured.measure(split, means_of(sums), is_end=is_end)

    def evaluate(self, outputs, targets, batch):
        self.num_passes += 1
        self.averages.measured.begin("val")
        size, sums = batch * self.world, {}
        results = [self._step("val", outputs, targets, start, size) for start in range(0, N, size)]
        add(sums, self.averages.collect(results, self.ranks.gather))
        found = self._measure("val", sums)
        return means_of(sums) | found if found is not None else self.evaluate(outputs, targets, batch)

    def train(self, outputs, targets, log_every, size=24, begin=0, end=N, sums=None):
        if begin == 0:
            self.averages.measured.begin("train")
        sums, found, window = {} if sums is None else sums, {}, []
        starts = list(range(begin, end, size))
        for number, start in enumerate(starts):
            window.append(self._step("train", outputs, targets, start, size))
            if number % log_every == log_every - 1 or start == starts[-1]:
                add(sums, self.averages.collect(window, self.ranks.gather))
                window.clear()
                found = self._measure("train", sums, start == starts[-1])
        return means_of(sums) | found


def on_each(world, functions, work, said=None):
    said = [] if said is None else said
    found = on_ranks(world, lambda rank, reduce: work(Rank(rank, world, reduce, functions, said)))
    assert all(each == found[0] for each in found)
    return found[0]


ALL = {"precision": precision, "recall": recall, "f1": f1, "accuracy": accuracy}


def expected(outputs, targets):
    return {name: pytest.approx(float(function(outputs, targets)), abs=1e-7) for name, function in ALL.items()}


def without_loss(row):
    return {name: value for name, value in row.items() if name != "loss"}


@pytest.fixture(params=["within the limit", "beyond the limit", "large outputs"])
def limit(request, monkeypatch):
    if request.param != "within the limit":
        monkeypatch.setattr(measured, "LIMIT_BYTES", 1800)
        monkeypatch.setattr(checking, "_CHUNK_BYTES", 300)
    if request.param == "large outputs":
        monkeypatch.setattr(averages, "_SMALL_OUTPUTS", 0)
    return request.param


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_an_evaluation_that_is_sorted_by_class_is_right(world, batch, limit):
    outputs, targets = scores(0.0)[ORDER], Y[ORDER]
    found = on_each(world, ALL, lambda rank: [rank.evaluate(outputs, targets, batch) for _ in range(2)])
    if limit == "within the limit" or batch > 1:
        assert [without_loss(row) for row in found] == [expected(outputs, targets)] * 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_function_that_looked_like_a_mean_for_long_is_right_once_it_is_none(world, limit):
    """Precision is accuracy as long as everything is called positive."""
    said = []

    def work(rank):
        rows = [without_loss(rank.evaluate(scores(bias), Y, 16)) for bias in (9.0, 9.0, 9.0, 0.0, 0.2)]
        return rows, rank.num_passes, rank.averages.measured.form

    rows, num_passes, form = on_each(world, {"precision": precision, "accuracy": accuracy}, work, said)
    for row, bias in zip(rows, (9.0, 9.0, 9.0, 0.0, 0.2), strict=True):
        assert row == {name: each for name, each in expected(scores(bias), Y).items() if name in row} and len(row) == 2
    assert form == {"precision": False}
    assert num_passes == 5 + (limit != "within the limit")  # evaluated again where not all outputs were kept
    assert len(said) == 1 and "metric 'precision' gives another value when its batch is split" in said[0]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("log_every", [2, 50])
@pytest.mark.parametrize("size", [24, 11])  # of 11 samples, the ranks have different numbers
def test_training_alone_finds_it_in_the_first_epoch(world, log_every, size):
    said = []
    found = on_each(world, ALL, lambda rank: [rank.train(scores(0.0), Y, log_every, size) for _ in range(2)], said)
    assert [without_loss(row) for row in found] == [expected(scores(0.0), Y)] * 2
    assert len(said) == 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_beyond_the_limit_training_is_right_from_the_next_epoch_on(world, monkeypatch):
    monkeypatch.setattr(measured, "LIMIT_BYTES", 600)
    first, second = on_each(world, ALL, lambda rank: [rank.train(scores(0.0), Y, 3) for _ in range(2)])
    assert (
        without_loss(second) == expected(scores(0.0), Y) and first["accuracy"] == expected(scores(0.0), Y)["accuracy"]
    )


@pytest.mark.parametrize(("cut", "is_found_before"), [(24, True), (72, False), (120, False)])
@pytest.mark.parametrize("world", [1, 2])
def test_a_resume_in_the_middle_of_an_epoch_finds_the_same(tmp_path, world, cut, is_found_before):
    outputs = torch.where(torch.arange(N)[:, None] < (0 if is_found_before else 100), scores(9.0), scores(0.0))
    functions = {"precision": precision, "accuracy": accuracy}

    def first(rank):
        sums = {}
        rank.train(outputs, Y, 1, end=cut, sums=sums)
        path = tmp_path / "checkpoint"
        saved = {"over_all": rank.wholes.save(path), "means": rank.averages.measured.form}
        return (
            json.dumps(saved),
            {name: list(pair) for name, pair in sums.items()},
            rank.train(outputs, Y, 1, begin=cut, sums=sums),
        )

    def second(rank):
        rank.averages.measured.form = json.loads(saved)["means"]
        rank.wholes.load(tmp_path / "checkpoint", json.loads(saved)["over_all"])
        return rank.train(outputs, Y, 1, begin=cut, sums=dict(sums))

    saved, sums, whole = on_each(world, functions, first)
    assert on_each(world, functions, second) == whole
    assert without_loss(whole) == {name: each for name, each in expected(outputs, Y).items() if name in functions}


def test_training_checks_when_the_samples_have_doubled_and_at_the_end_of_the_epoch():
    sizes = []

    def seen(outputs, targets):
        sizes.append(len(targets))
        return accuracy(outputs, targets)

    on_each(1, {"seen": seen}, lambda rank: rank.train(scores(0.0), Y, 1, size=8))
    assert [size for size in sizes if size > 8] == [16, 32, 16, 10, 64, 32, 21, 11, 128, 64, 42, 22, 203, 101, 67, 35]


def test_what_a_function_cannot_take_at_once_stays_a_mean():
    def of_batches(outputs, targets):
        if len(targets) > 16:
            raise ValueError("too many")
        return accuracy(outputs, targets)

    found = on_each(2, {"of_batches": of_batches}, lambda rank: rank.train(scores(0.0), Y, 50))
    assert found["of_batches"] == pytest.approx(float(accuracy(scores(0.0), Y)), abs=1e-7)


def test_what_waits_for_the_check_is_forgotten_at_a_new_epoch_without_a_call(monkeypatch):
    monkeypatch.setattr(measured, "LIMIT_BYTES", 0)
    monkeypatch.setattr(checking, "_CHUNK_BYTES", 0)
    calls = []

    def seen(outputs, targets):
        calls.append(len(targets))
        return accuracy(outputs, targets)

    def work(rank):
        rank.averages.measured.begin("train")
        rank._step("train", scores(0.0), Y, 0, 24)
        rank.averages.measured.begin("train")
        return len(calls)

    assert on_each(1, {"seen": seen}, work) == 0
