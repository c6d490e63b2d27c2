"""The message about a loss that is not finite names the samples of the data set, if their order is known."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed.backends._torch.loading import shard
from distributed.backends._torch.nested import rows_not_finite
from distributed.backends.non_finite import NanPolicy, describe, votes_of
from distributed.backends.world import OneProcess
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.state import DataRole, StepResult, UpdateBatch, WorkerContext

NAN = math.nan


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ((torch.zeros(2), torch.zeros(1)) for _ in range(16))


class Texts:
    """A data set with keys of its own, which a sampler yields."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, key: str) -> Any:
        return torch.full([2], NAN) if key == "d" else torch.zeros(2)


def world(rank: int = 0, size: int = 1) -> OneProcess:
    return OneProcess(WorkerContext(rank, size, rank, size, 0, "cpu"))


def updates(data: Any, plan: BatchPlan, rank: int = 0, **settings: Any) -> list[UpdateBatch]:
    context = WorkerContext(rank, plan.data_parallel_size, rank, plan.data_parallel_size, 0, "cpu")
    sharded = shard(
        data, batch=plan, context=context, config=DistributedConfig(**{"shuffle": False, **settings}), options=DataOptions(), role=DataRole.TRAINING,
        reduce=lambda sums: dict.fromkeys(sums, max(sums.values())),
    )  # fmt: skip
    return list(sharded.epoch(0))


def text(update_batch: UpdateBatch, losses: list[float]) -> str:
    here = world()
    return describe(here, 3, update_batch, votes_of(here, losses), losses, rows_not_finite)


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count, dtype=torch.float32).reshape(count, 1))


def test_only_the_micro_batch_whose_loss_is_not_finite_is_named_by_its_indices() -> None:
    plan = BatchPlan(2, 2, 1, 4)
    second = updates(numbers(8), plan)[1]
    assert text(second, [0.5, NAN]) == (
        "step 3: the loss is nan on rank 0 for samples 6, 7 of the data set (samples at positions 4 to 7 of the epoch)"
    )


def test_the_indices_are_those_that_were_read_at_any_rank_and_in_a_short_last_update() -> None:
    for rank in range(2):
        for update_batch in updates(numbers(11), BatchPlan(2, 2, 2, 8), rank, shuffle=True, seed=3):
            assert update_batch.keys_at is not None
            keys = update_batch.keys_at(update_batch.position, update_batch.num_samples)
            read = [micro.batch[0].flatten().tolist()[: micro.num_samples] for micro in update_batch.micro_batches]
            assert keys == read and sum(map(len, keys)) in (4, 2, 1)


def test_the_sample_that_is_not_finite_itself_is_singled_out() -> None:
    values = torch.zeros(8, 3)
    values[5, 1] = math.inf
    for data in (TensorDataset(values, torch.zeros(8)), DataLoader(TensorDataset(values), batch_size=4, num_workers=1)):
        found = text(updates(data, BatchPlan(4, 1, 1, 4))[1], [NAN])
        assert "for samples 4, 5, 6, 7 of the data set; not finite in the data: 5 (samples at" in found


def test_keys_of_a_sampler_are_named_and_long_batches_are_cut() -> None:
    loader = DataLoader(Texts(), batch_size=4, sampler=list("abcdefgh"))
    assert "for samples a, b, c, d of the data set; not finite in the data: d" in text(
        updates(loader, BatchPlan(4, 1, 1, 4), shuffle=None)[0], [NAN]
    )
    assert "for samples 0, 1, " in (long := text(updates(numbers(100), BatchPlan(100, 1, 1, 100))[0], [NAN]))
    assert " 30, 31 and 68 more of the data set (samples at positions 0 to 99" in long


def test_streams_have_positions_only() -> None:
    (first, *_) = updates(Stream(), BatchPlan(4, 1, 1, 4), shuffle=None)
    assert text(first, [NAN]) == "step 3: the loss is nan on rank 0 (samples at positions 0 to 3 of the epoch)"


def test_all_samples_of_the_update_are_named_if_a_gradient_is_not_finite() -> None:
    (first, *_) = updates(numbers(8), BatchPlan(2, 2, 1, 4))
    assert text(first, [0.5, 0.5]) == (
        "step 3: a gradient is NaN or infinite for samples 0, 1, 2, 3 of the data set (samples at positions 0 to 3 of the epoch)"
    )


def test_each_rank_names_its_first_samples_and_the_rest_is_counted() -> None:
    """Also if the samples of one rank would fill the message."""
    plan, values = BatchPlan(40, 1, 2, 80), torch.zeros(80, 1)
    values[[3, 77]] = NAN
    data, barrier, said = TensorDataset(values), threading.Barrier(2, timeout=20), [None, None]

    class TwoRanks(OneProcess):
        def gather(self, value: Any) -> list[Any]:
            said[self.rank] = value
            barrier.wait()
            return list(said)

    def describe_on(rank: int, votes: dict[int, float]) -> str:
        here, losses = TwoRanks(WorkerContext(rank, 2, rank, 2, 0, "cpu")), [NAN if votes[rank] else 0.5]
        return describe(here, 3, updates(data, plan, rank)[0], votes, losses, rows_not_finite)

    for votes, ranks in (({0: 0.0, 1: 0.0}, (0, 1)), ({0: 0.0, 1: 1.0}, (1,))):
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(describe_on, range(2), [votes] * 2))
        assert texts[0] == texts[1]
        keys = [range(80)[rank::2] for rank in ranks]  # in turns, because they are not shuffled
        named = ", ".join(str(key) for each in keys for key in each[:16])
        assert f"for samples {named} and {24 * len(ranks)} more of the data set; not finite in the data: " in texts[0]
        bad = ", ".join(str(key) for each in keys for key in each if key in (3, 77))
        assert f"not finite in the data: {bad} (" in texts[0]


def test_tensors_that_cannot_be_looked_at_are_left_out() -> None:
    plain = torch.tensor([[1.0, NAN, 1.0], [1.0, 1.0, 1.0]])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    others = [plain.to_sparse(), plain.to(torch.float8_e4m3fn), nested, torch.ones(2, 0)]
    assert rows_not_finite([plain, *others], 2) == [0]
    assert rows_not_finite(plain[:, :2], 2) == [0]
    assert rows_not_finite(torch.full((2, 3, 2, 2), NAN), 2) == [0, 1]  # images
    assert (
        rows_not_finite(torch.full((2, 2, 3), NAN), 2) == []
    )  # sequences, whose second dimension may be that of the samples


def test_the_samples_are_looked_for_only_if_there_is_a_message() -> None:
    """Looking for them is a collective, and many updates in a row may be left out."""
    said: list[Mapping[str, Any]] = []
    described: list[int] = []

    def at(step: int) -> str:
        described.append(step)
        return f"step {step}"

    policy = NanPolicy("skip", said.append)
    for step in range(3, 24):
        policy.apply(step, functools.partial(at, step), StepResult([]), can_be_made=True)
    assert described == [3, 12] and [event["text"] for event in said] == [
        "step 3: update left out",
        "step 12: update left out (10 in a row)",
    ]


def test_nothing_is_computed_while_losses_are_finite() -> None:
    """One function serves all updates of an epoch."""
    first, second = updates(numbers(8), BatchPlan(4, 1, 1, 4))
    assert first.keys_at is second.keys_at
