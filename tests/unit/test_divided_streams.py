"""Streams of which each rank reads only its part: the order of one process, positions in checkpoints, and wrong hooks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distributed.data import aligned_micro_batches, slices
from distributed.errors import ConfigError
from tests.unit.ranks import groups_of_ranks, on_ranks, plan, samples_used, sharded

pytestmark = [
    pytest.mark.timeout(360),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Divisible(IterableDataset[Any]):
    """A shuffled stream of the numbers below `count`. `read` counts the samples that were read in this process."""

    read = 0

    def __init__(self, count: int) -> None:
        self.count, self.index, self.parts, self.epoch = count, 0, 1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, index: int, count: int) -> Divisible:
        part = copy.copy(self)
        part.index, part.parts = index, count
        return part

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        lanes, lane = (info.num_workers, info.id) if info else (1, 0)
        order = torch.randperm(self.count).tolist()[self.index :: self.parts][lane::lanes]
        yield from map(self.sample, order)

    def sample(self, key: int) -> int:
        type(self).read += 1
        return key + 1000 * self.epoch


class Plain(IterableDataset[Any]):
    """A stream that cannot be divided."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.count))


class Skipping(Divisible):
    """One that can also move on without reading."""

    begin = 0

    def skip(self, count: int) -> Skipping:
        rest = copy.copy(self)
        rest.begin = self.begin + count
        return rest

    def __iter__(self) -> Iterator[Any]:
        yield from map(self.sample, range(self.count)[self.index :: self.parts][self.begin :])


class Telling(Divisible):
    """One that tells where it stands."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        for key in range(self.count)[self.index :: self.parts][self.at :]:
            self.at += 1
            yield self.sample(key)


def used(data: Any, world: int, size: int = 12, steps: int = 1, **settings: Any) -> list[list[int]]:
    """The samples of each update, sorted: which rank has which does not matter."""
    batch = plan(world, size // world // steps, steps, size)
    return [
        sorted(each) for each in samples_used(groups_of_ranks(data, batch, **settings), lambda batch: batch.tolist())
    ]


def test_micro_batches_begin_at_multiples_of_the_ranks_and_are_the_slices_of_a_full_update() -> None:
    for world, size, steps in ((1, 3, 2), (2, 3, 1), (3, 2, 2), (4, 2, 3)):
        batch = plan(world, size, steps)
        for count in range(1, batch.global_batch_size + 1):
            parts = aligned_micro_batches(count, batch)
            assert [i for part in parts for i in part] == list(range(count))
            assert all(part.start % world == 0 and 0 < len(part) <= size * world for part in parts)
        ranks = [[part[rank::world] for part in parts] for rank in range(world)]
        assert ranks == [slices(batch.global_batch_size, batch, rank) for rank in range(world)]


WORLDS = [(2, 3), (3, 1)]
MORE_WORLDS = [pytest.param(*each, marks=pytest.mark.full) for each in ((1, 2), (2, 1), (3, 2), (4, 1))]


@pytest.mark.parametrize(("world", "steps"), [*WORLDS, *MORE_WORLDS])
def test_the_updates_are_those_of_one_process(world: int, steps: int) -> None:
    for kind, counts in ((Divisible, (1, 2, 47)), (Skipping, (48, 49))):
        for count in counts:
            wanted = used(kind(count), 1, epoch=2)
            assert sorted(value for update in wanted for value in update) == [2000 + i for i in range(count)]
            for skip in (0, 12, 40):
                if skip < count:  # 40 is inside an update, as after a change of the global batch
                    found = used(kind(count), world, 12, steps, epoch=2, skip=skip)
                    assert found == (wanted[skip // 12 :] if skip < 40 else used(kind(count), 1, epoch=2, skip=skip))


def test_each_rank_reads_only_its_part() -> None:
    data = Divisible(960)
    for world in (1, 2, 4):
        Divisible.read = 0
        used(data, world, 24)
        assert Divisible.read <= 960 + 16 * world  # the first samples of the whole stream are compared
    for kind, most in ((Skipping, 96), (Divisible, 960)):
        kind.read = 0
        used(kind(960), 2, 24, skip=864)
        assert kind.read == most


def test_loader_processes_divide_a_part_and_leave_the_order_alone() -> None:
    wanted = used(Divisible(50), 1)
    for size, workers in ((1, 1), (5, 3)):
        loader = DataLoader(Divisible(50), size, num_workers=workers)
        assert used(loader, 1) == wanted
        assert used(loader, 2, skip=24) == wanted[2:]


def test_a_global_batch_that_does_not_divide_is_read_by_every_rank() -> None:
    batch = plan(3, 6, 1, 16)
    assert sharded(Divisible(40), batch).notices == [
        "train_data: every rank must read the whole stream, because global_batch_size=16 is not divisible by the 3 processes"
    ]
    ranks = groups_of_ranks(Divisible(40), batch)
    updates = [sorted(each) for each in samples_used(ranks, lambda batch: batch.tolist())]
    assert updates == used(Divisible(40), 1, 16)


def test_a_notice_says_that_and_why_every_rank_must_read_the_whole_stream() -> None:
    datasets = pytest.importorskip("datasets")
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    rows = datasets.Dataset.from_dict({"x": list(range(100))}).to_iterable_dataset(num_shards=4)
    of_python = "its rows come from Python code, such as a function of map() or a generator"
    for data, why in (
        (map(float, range(100)), "map is an iterator, which cannot be divided"),
        (DataLoader(Plain(40), 4, num_workers=1), "Plain has no method shard(index, count)"),
        (rows.map(lambda row: {"x": row["x"] + 1}), of_python),
        (datasets.IterableDataset.from_generator(lambda: ({"x": x} for x in range(40))), of_python),
        (DataLoader(rows, 4, num_workers=1), "its DataLoader has num_workers above 0"),
        (split(rows, 0, 2), "split_dataset_by_node has divided it already"),
    ):
        assert sharded(data, plan(2, 4)).notices == [
            f"train_data: every rank must read the whole stream, because {why}"
        ]
        assert not sharded(data, plan(1, 8)).notices
        assert not sharded(data, plan(2, 4), shard_streams=False).notices
    for data in (rows, Divisible(40)):
        assert not sharded(data, plan(2, 4)).notices


def test_the_limit_of_a_validation_and_drop_last_count_samples_of_all_ranks() -> None:
    import dataclasses

    for world in (1, 2, 3):
        batch = dataclasses.replace(plan(world, 12 // world), max_samples=31)
        ranks = groups_of_ranks(Skipping(50), batch, train=False)
        updates = samples_used(ranks, lambda batch: batch.tolist())
        assert sorted(value for update in updates for value in update) == list(range(31))
        assert list(map(len, used(DataLoader(Skipping(50), 12, drop_last=True), world))) == [12] * 4


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 0), (2, 2), pytest.param(1, 2, marks=pytest.mark.full)])
def test_a_resume_continues_at_the_states_of_the_parts(world: int, workers: int) -> None:
    def make() -> Any:
        return DataLoader(Telling(200), 4, num_workers=workers) if workers else Telling(200)

    def begin(rank: int, reduce: Any) -> tuple[Any, list[list[int]]]:
        part = sharded(make(), plan(world, 8 // world), rank, reduce)
        updates = part.epoch(0)
        for _ in range(21):  # an update more than those that are used
            next(updates)
        cursor = part.cursor(160)
        rest = [update.micro_batches[0].batch.tolist() for update in updates]
        part.close()
        return cursor, rest

    begun = on_ranks(world, begin)
    cursor = {"epoch": 0, "samples": 160, "ranks": [each for each, _ in begun]}
    Telling.read = 0

    def resume(rank: int, reduce: Any, cursor: Any = cursor) -> list[list[int]]:
        part = sharded(make(), plan(world, 8 // world), rank, reduce)
        part.seek(cursor)
        updates = [update.micro_batches[0].batch.tolist() for update in part.epoch(0, 160)]
        part.close()
        return updates

    assert [each[1:] for each in on_ranks(world, resume)] == [rest for _, rest in begun]
    assert Telling.read == (0 if workers else 40)
    assert (
        used(Telling(200), 4, 8, skip=160) == used(Telling(200), 1, 8)[20:]
    )  # another number of processes reads again


def test_streams_of_hugging_face_drop_the_rows_of_other_ranks_and_keep_the_order() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": list(range(100))})

    def rows(world: int, **settings: Any) -> list[list[int]]:
        data = table.to_iterable_dataset(num_shards=4)
        ranks = groups_of_ranks(data, plan(world, 12 // world), **settings)
        return [sorted(each) for each in samples_used(ranks, lambda batch: batch["x"].tolist())]

    for world in (2, 3):
        assert rows(world) == rows(1)
        assert rows(world, skip=36) == rows(1)[3:]

    def begin(rank: int, reduce: Any) -> tuple[Any, list[Any]]:
        part = sharded(table.to_iterable_dataset(num_shards=4), plan(2, 6), rank, reduce)
        updates = part.epoch(0)
        for _ in range(4):
            next(updates)
        assert part.has_own_cursor
        cursor = part.cursor(48)
        return cursor, [update.micro_batches[0].batch["x"].tolist() for update in updates]

    begun = on_ranks(2, begin)
    assert all(cursor["parts"][0][3] for cursor, _ in begun)

    def resume(rank: int, reduce: Any) -> list[Any]:
        part = sharded(table.to_iterable_dataset(num_shards=4), plan(2, 6), rank, reduce)
        part.seek({"epoch": 0, "samples": 48, "ranks": [cursor for cursor, _ in begun]})
        return [update.micro_batches[0].batch["x"].tolist() for update in part.epoch(0, 48)]

    assert on_ranks(2, resume) == [rest for _, rest in begun]
    split = datasets.distributed.split_dataset_by_node
    own = [split(table.to_iterable_dataset(num_shards=4), rank, 2) for rank in range(2)]
    with pytest.raises(ConfigError, match=r"set data\.presharded=true"):
        groups_of_ranks(own, plan(2), per_rank=True)


def with_shard(shard: Callable[..., Any]) -> Any:
    return type("Wrong", (Skipping,), {"shard": shard})(40)


def contiguous(self: Any, index: int, count: int) -> Any:
    size = self.count // count
    return range(index * size, (index + 1) * size)


def uneven(self: Any, index: int, count: int) -> Any:
    return range(self.count)[index::count][: 20 if index else 3]


def only_the_first(self: Any, index: int, count: int) -> Any:
    return range(self.count)[0::count]


WRONG = {
    r"Wrong\.shard\(num_shards, index\) is not the hook shard\(index, count\)": lambda self, num_shards, index: self,
    r"shard\(\d, 2\) returned the whole data set: return another": lambda self, index, count: self,
    r"shard\(\d, 2\) returned a int: return another": lambda self, index, count: 3,
    r"sample \d of shard\(\d, 2\) is not sample \d of the stream: part i yields|rank \d has found": contiguous,
    r"sample 0 of shard\(1, 2\) is not sample 1 of the stream|rank 1 has found": only_the_first,
    r"parts of unequal length \(from sample 0 on, 4 on rank 0, 3 on rank 1\)|from sample 4 on, ": uneven,
}


@pytest.mark.parametrize("message", list(WRONG))
def test_a_wrong_hook_is_refused_in_one_line(message: str) -> None:
    def work(rank: int, reduce: Any) -> str:
        with pytest.raises(ConfigError, match=message) as caught:
            list(sharded(with_shard(WRONG[message]), plan(2, 2), rank, reduce).epoch(0))
        return str(caught.value)

    assert all("\n" not in text for text in on_ranks(2, work))
    whole = groups_of_ranks(with_shard(WRONG[message]), plan(2, 2), shard_streams=False)
    assert sum(len(each) for each in samples_used(whole, lambda batch: batch.tolist())) == 40


def test_ranks_with_different_streams_are_refused() -> None:
    class From(Skipping):
        def sample(self, key: int) -> int:
            return key + 7 * self.first

    data = [From(40) for _ in range(2)]
    for rank, each in enumerate(data):
        each.first = rank  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="the ranks have different streams"):
        groups_of_ranks(data, plan(2), per_rank=True)


def test_random_numbers_of_single_samples_are_noticed() -> None:
    class Augmented(Skipping):
        def sample(self, key: int) -> int:
            return key + 1000 * random.randrange(1000)

    with pytest.raises(ConfigError, match="is not sample"):
        groups_of_ranks(Augmented(40), plan(2))


@pytest.mark.parametrize("kind", ["stream", "map"])
def test_presharded_data_continues_on_each_rank_and_refuses_another_number_of_ranks(kind: str) -> None:
    class Part(Skipping):
        shard = None  # type: ignore[assignment]

    def make(rank: int) -> Any:
        return Part(40 - 21 * rank) if kind == "stream" else list(range(40 - 21 * rank))

    def begin(rank: int, reduce: Any, done: int) -> tuple[Any, list[Any]]:
        part = sharded(
            make(rank), plan(2, 4), rank, reduce, presharded=True, shuffle=None if kind == "stream" else True
        )
        updates = part.epoch(0)
        samples = sum(next(updates).num_samples for _ in range(done))
        cursor = {"epoch": 0, "samples": samples, "mine": part.cursor(samples)}
        rest = [
            (u.position, [m.num_samples for m in u.micro_batches], u.micro_batches[0].batch.tolist()) for u in updates
        ]
        return cursor, rest

    for done in (1, 4, 5, 7):
        begun = on_ranks(2, lambda rank, reduce, done=done: begin(rank, reduce, done))
        cursor = {**begun[0][0], "ranks": [each["mine"] for each, _ in begun]}

        def resume(rank: int, reduce: Any, cursor: Any = cursor) -> list[Any]:
            part = sharded(
                make(rank), plan(2, 4), rank, reduce, presharded=True, shuffle=None if kind == "stream" else True
            )
            part.seek(cursor)
            updates = part.epoch(0, cursor["samples"])
            return [
                (u.position, [m.num_samples for m in u.micro_batches], u.micro_batches[0].batch.tolist())
                for u in updates
            ]

        resumed = on_ranks(2, resume)
        for rank, (_, rest) in enumerate(begun):
            assert [each[:2] for each in resumed[rank]] == [each[:2] for each in rest]
            assert [each[2] for each in resumed[rank] if sum(each[1])] == [each[2] for each in rest if sum(each[1])]
    part = sharded(make(0), plan(3, 4), presharded=True)
    part.seek(cursor)
    with pytest.raises(ConfigError, match="2 processes read, and this run has 3, whose parts differ: resume with 2"):
        next(part.epoch(0, cursor["samples"]))


def test_presharded_batches_are_read_again_and_refuse_another_number_of_ranks() -> None:
    def make(rank: int) -> Any:
        return DataLoader(list(torch.arange(16 * rank, 16 * rank + 16).split(4)), batch_size=None)

    whole = groups_of_ranks([make(0), make(1)], plan(2, 4), per_rank=True, presharded=True)

    def resume(rank: int, reduce: Any) -> list[Any]:
        part = sharded(make(rank), plan(2, 4), rank, reduce, presharded=True)
        part.seek({"epoch": 0, "samples": 16, "ranks": [{"epoch": 0, "samples": 8, "data": None}] * 2})
        return [update.micro_batches[0].batch.tolist() for update in part.epoch(0, 16)]

    assert on_ranks(2, resume) == [[u.micro_batches[0].batch.tolist() for u in each[2:]] for each in whole]
    part = sharded(make(0), plan(1, 4), presharded=True)
    part.seek({"epoch": 0, "samples": 16, "ranks": [{"epoch": 0, "samples": 8, "data": None}] * 2})
    with pytest.raises(ConfigError, match="2 processes read, and this run has 1"):
        next(part.epoch(0, 16))
