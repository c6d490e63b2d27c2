"""Streams cut over ranks, and ranks that bring their own parts: each sample once, never a hang."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from distributed.errors import ConfigError
from tests.unit.ranks import groups_of_ranks, on_ranks, plan, samples_used, sharded

pytestmark = [
    pytest.mark.timeout(360),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Stream(IterableDataset[Any]):
    """The numbers from `start` on; loader processes take every n-th."""

    def __init__(self, count: int, start: int = 0) -> None:
        self.count, self.start, self.opened = count, start, 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        info = get_worker_info()
        every, first = (info.num_workers, info.id) if info else (1, 0)
        yield from range(self.start + first, self.start + self.count, every)


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Announced(Stream):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            yield value + 100 * self.epoch


class ShufflesAndDraws(Stream):
    """A shuffle buffer, as streams of files have, and a draw for each sample."""

    def __iter__(self) -> Iterator[Any]:
        buffer = list(super().__iter__())
        random.shuffle(buffer)
        for value in buffer:
            yield value, torch.randn(1), numpy.random.randn(), random.gauss(0, 1)


def numbers(batch: Any) -> list[int]:
    values = batch[0] if isinstance(batch, list | tuple) else batch
    return values.tolist()


def rows(ranks: Any) -> list[list[Any]]:
    def read(batch: Any) -> list[Any]:
        return list(zip(*(column.tolist() for column in batch), strict=True))

    return [sorted(each) for each in samples_used(ranks, read)]


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2])
def test_every_sample_of_a_stream_once_over_all_ranks(world: int, steps: int) -> None:
    for count in (1, 47, 48, 49):
        batch = plan(world, 24 // world // steps, steps)
        updates = [sorted(each) for each in samples_used(groups_of_ranks(Stream(count), batch), numbers)]
        assert updates == [list(range(i, min(i + 24, count))) for i in range(0, count, 24)]


def test_a_resumed_stream_equals_the_tail_at_another_world_size() -> None:
    whole = rows(groups_of_ranks(ShufflesAndDraws(30), plan(1, 12), epoch=2))
    for world in (1, 2, 3):
        for done in (0, 1, 2, 3):
            tail = groups_of_ranks(ShufflesAndDraws(30), plan(world, 12 // world), epoch=2, skip=min(done * 12, 30))
            assert rows(tail) == whole[done:]


def test_a_streams_draws_are_the_same_at_any_world_size_and_leave_ours_alone() -> None:
    torch.randn(1), numpy.random.randn(), random.gauss(0, 1)
    for workers in (0, 2):
        loader = DataLoader(ShufflesAndDraws(30), 6, num_workers=workers)
        before = states()
        runs = [rows(groups_of_ranks(loader, plan(world, 12 // world), epoch=1)) for world in (1, 3)]
        assert states() == before
        assert runs[0] == runs[1]
        assert [row for update in runs[0] for row in update] != sorted(row for update in runs[0] for row in update)
        assert runs[0] != rows(groups_of_ranks(loader, plan(1, 12), epoch=2))


@pytest.mark.parametrize("size", [1, 3])
def test_workers_read_a_stream_in_the_order_of_a_users_own_loader(size: int) -> None:
    loader = DataLoader(Stream(25), size, num_workers=2)
    [groups] = groups_of_ranks(loader, plan(1, 4))
    ours = [value for group in groups for value in numbers(group.micro_batches[0].batch)]
    theirs = [
        value for batch in DataLoader(Stream(25), size if size > 1 else 32, num_workers=2) for value in batch.tolist()
    ]
    assert ours == theirs
    assert sorted(ours) == list(range(25))


class Mixed(Stream):
    def __iter__(self) -> Iterator[Any]:
        for value in super().__iter__():
            yield {"x": torch.full((2,), float(value)), "y": value, "half": torch.tensor(value, dtype=torch.bfloat16)}


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_batches_are_bit_for_bit_torchs_own(workers: int) -> None:
    [groups] = groups_of_ranks(DataLoader(Mixed(10), 4, num_workers=workers), plan(1, 4))
    for group, theirs in zip(groups, DataLoader(Mixed(10), 4), strict=True):
        ours = group.micro_batches[0].batch
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)


def test_workers_of_a_stream_take_no_file_descriptor_per_sample() -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())  # that this process has open
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, limits[1]))
    try:
        [groups] = groups_of_ranks(DataLoader(Mixed(600), num_workers=1), plan(1, 600))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert groups[0].num_samples == 600


def test_set_epoch_reaches_the_stream_in_workers_too() -> None:
    for workers in (0, 2):
        loader = DataLoader(Announced(6), 2, num_workers=workers, persistent_workers=workers > 0)
        part = sharded(loader, plan(1, 6))
        for epoch in (3, 4):
            [group] = part.epoch(epoch)
            assert sorted(numbers(group.micro_batches[0].batch)) == [100 * epoch + i for i in range(6)]
        part.close()


def test_length_is_known_where_the_stream_has_one() -> None:
    assert (sharded(Sized(10)).num_samples, sharded(Sized(10)).updates_per_epoch) == (10, 3)
    assert (sharded(Stream(10)).num_samples, sharded(Stream(10)).updates_per_epoch) == (None, None)
    assert sharded(DataLoader(Sized(10), 4, drop_last=True)).num_samples == 8
    assert len(list(sharded(DataLoader(Sized(10), 4, drop_last=True)).epoch(0))) == 2


def test_a_generator_serves_one_epoch_and_says_why_not_two() -> None:
    part = sharded(iter(range(10)))
    assert sum(group.num_samples for group in part.epoch(0)) == 10
    with pytest.raises(ConfigError, match="can be read only once, and epoch 2 reads it again: give a list"):
        part.epoch(1)
    with pytest.raises(ConfigError, match="can be read only once, and epochs=3 reads it again"):
        sharded((i for i in range(4)), epochs=3)


def test_an_empty_stream_and_a_shuffled_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="Stream yields no batch"):
        list(sharded(Stream(0)).epoch(0))
    with pytest.raises(ConfigError, match="shuffle=True cannot order a stream"):
        sharded(Stream(4), shuffle=True)


def test_streams_that_are_already_cut_are_refused_on_all_ranks() -> None:
    data = [Stream(20, start=0), Stream(16, start=20), Stream(20, start=36)]

    def work(rank: int, reduce: Callable[..., Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            next(sharded(data[rank], plan(3), rank, reduce).epoch(0))
        return str(caught.value)

    messages = on_ranks(3, work)
    assert set(messages) == {messages[0]}
    assert "set data.presharded=true" in messages[0]


def parts_of(kind: str, sizes: list[int]) -> list[Any]:
    parts, start = [], 0
    for size in sizes:
        values = torch.arange(start, start + size)
        if kind == "stream":
            parts.append(Stream(size, start))
        elif kind == "workers":
            parts.append(DataLoader(Stream(size, start), 8, num_workers=1))
        elif kind == "map":
            parts.append(TensorDataset(values))
        else:
            parts.append(DataLoader(list(values.split(8)), batch_size=None, shuffle=kind == "shuffled batches"))
        start += size
    return parts


@pytest.mark.parametrize("kind", ["stream", "workers", "map", "batches", "shuffled batches"])
@pytest.mark.parametrize("train", [True, False])
def test_uneven_presharded_parts_are_used_once(kind: str, train: bool) -> None:
    for sizes, steps in (([40, 32], 1), ([40, 32], 2), ([8, 64, 1], 1)):
        parts = parts_of(kind, sizes)
        batch = plan(len(sizes), 8, steps)
        ranks = groups_of_ranks(parts, batch, per_rank=True, presharded=True, train=train)
        updates = samples_used(ranks, numbers)
        assert sorted(value for update in updates for value in update) == list(range(sum(sizes)))
        assert len(updates) == -(-max(sizes) // (8 * steps))


def test_presharded_ranks_that_ran_out_repeat_their_last_batch_unchanged() -> None:
    class Dicts(Stream):
        def __iter__(self) -> Iterator[Any]:
            return ({"x": value} for value in super().__iter__())

    def work(rank: int, reduce: Callable[..., Any]) -> list[Any]:
        part = sharded(Dicts(4 + 8 * rank, 100 * rank), plan(2), rank, reduce, presharded=True)
        return [(m.batch.pop("x").tolist(), m.num_samples) for group in part.epoch(0) for m in group.micro_batches]

    assert on_ranks(2, work)[0] == [([0, 1, 2, 3], 4), ([0, 1, 2, 3], 0), ([0, 1, 2, 3], 0)]


@pytest.mark.parametrize("kind", ["stream", "map"])
def test_presharded_resume_equals_the_tail(kind: str) -> None:
    whole = groups_of_ranks(parts_of(kind, [40, 20]), plan(2, 8), per_rank=True, presharded=True, epoch=1)
    positions = [group.position for group in whole[0]]
    assert positions == [0, 16, 32, 44, 52]
    for done, skip in enumerate([*positions, 60]):
        tail = groups_of_ranks(parts_of(kind, [40, 20]), plan(2, 8), per_rank=True, presharded=True, epoch=1, skip=skip)
        assert samples_used(tail, numbers) == samples_used([groups[done:] for groups in whole], numbers)
    with pytest.raises(ConfigError, match="after 17 samples of the epoch, which is inside an update"):
        groups_of_ranks(parts_of(kind, [40, 20]), plan(2, 8), per_rank=True, presharded=True, skip=17)


@pytest.mark.parametrize("dataset", [Stream, range])
def test_a_presharded_rank_without_any_sample_is_an_error_on_all(dataset: Any) -> None:
    def work(rank: int, reduce: Callable[..., Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            next(sharded(dataset(8 * rank), plan(2), rank, reduce, presharded=True).epoch(0))
        return str(caught.value)

    assert on_ranks(2, work) == ["train_data: rank 0 has no sample at all: give every rank at least one"] * 2


def test_a_presharded_loader_keeps_its_distributed_sampler() -> None:
    data = TensorDataset(torch.arange(24))
    loaders = [DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank)) for rank in range(2)]
    ranks = groups_of_ranks(loaders, plan(2, 4), per_rank=True, presharded=True, epoch=3)
    assert sorted(value for update in samples_used(ranks, numbers) for value in update) == list(range(24))


def test_whole_batches_keep_their_draws_to_themselves() -> None:
    class Batches(Stream):
        def __iter__(self) -> Iterator[Any]:
            return (torch.randn(3, 2) for _ in range(self.count))

    loader = DataLoader(Batches(4), batch_size=None)
    before = states()
    runs = [groups_of_ranks(loader, plan(1, 3), presharded=True) for _ in range(2)]
    assert states() == before
    first, again = ([g.micro_batches[0].batch.tolist() for g in groups] for [groups] in runs)
    assert first == again
    assert len(first) == 4
    assert len({str(each) for each in first}) == 4


def test_batches_without_tensors_have_no_size() -> None:
    with pytest.raises(ConfigError, match="a str without tensors has no batch size"):
        list(sharded(DataLoader(["words"], batch_size=None), presharded=True).epoch(0))


class Told(Stream):
    """A stream that knows where it stands, and counts what is read of it."""

    def __init__(self, count: int, draws: bool = False) -> None:
        super().__init__(count)
        self.at = self.first = self.read = 0
        self.draws = draws

    def __iter__(self) -> Iterator[Any]:
        for value in range(self.first + 1, self.count + 1):
            self.at = value
            self.read += 1
            yield value + (random.randrange(1000) * 100 if self.draws else 0)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["at"]


def streams_of_hugging_face() -> list[Any]:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    return [data, data.map(lambda row: {"x": row["x"] + 1}).filter(lambda row: row["x"] % 3), data.with_format("torch")]


def values(batch: Any) -> list[int]:
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()


@pytest.mark.parametrize("world", [1, 2])
def test_a_stream_that_tells_its_position_continues_there_at_any_number_of_processes(world: int) -> None:
    kinds: list[Callable[[], Any]] = [lambda: Told(40), *(lambda n=n: streams_of_hugging_face()[n] for n in range(3))]
    for make in kinds:
        first = sharded(make(), plan(1, 8))
        updates = first.epoch(1)
        before = [values(next(updates).micro_batches[0].batch) for _ in range(2)]
        cursor = first.cursor(16)
        assert cursor is not None and (cursor["epoch"], cursor["samples"]) == (1, 16)
        rest = [values(update.micro_batches[0].batch) for update in updates]
        made: list[Any] = []

        def resumed(rank: int, reduce: Any, make: Any = make, made: Any = made, cursor: Any = cursor) -> list[Any]:
            made.append(make())
            part = sharded(made[-1], plan(world, 8 // world), rank, reduce)
            part.seek(cursor)
            return [values(update.micro_batches[0].batch) for update in part.epoch(1, 16)]

        parts = on_ranks(world, resumed)
        assert rest and [sorted(itertools.chain(*each)) for each in zip(*parts, strict=True)] == list(
            map(sorted, rest)
        ), before
        if isinstance(made[0], Told):
            assert [each.read for each in made] == [24] * world  # and not 40


def test_a_stream_whose_state_is_not_all_of_it_is_read_again() -> None:
    datasets = pytest.importorskip("datasets")
    buffered = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset().shuffle(seed=1, buffer_size=8)
    for data in (Told(40, draws=True), buffered, buffered.map(lambda row: row), Stream(40)):
        part = sharded(data, plan(1, 8))
        next(part.epoch(0))
        assert part.cursor(8) is None


def test_a_position_of_another_sample_is_not_used() -> None:
    data = Told(40)
    part = sharded(data, plan(1, 8))
    part.seek({"epoch": 0, "samples": 16, "state": {"at": 16}})
    assert values(next(part.epoch(0, 8)).micro_batches[0].batch) == list(range(9, 17))


@pytest.mark.parametrize(
    "wrap", [lambda raw: raw, lambda raw: raw.map(dict).shuffle(4), lambda raw: DataLoader(raw, 4)]
)
@pytest.mark.parametrize("presharded", [False, True])
def test_a_webdataset_without_a_node_splitter_is_refused_on_several_processes(wrap: Any, presharded: bool) -> None:
    webdataset = pytest.importorskip("webdataset")

    def opened(raw: Any, world: int, **options: Any) -> Any:
        return on_ranks(world, lambda rank, reduce: sharded(wrap(raw), plan(world), rank, reduce, **options))

    def made(**arguments: Any) -> Any:
        return webdataset.WebDataset(["missing.tar"], shardshuffle=False, **arguments)

    for train in (True, False):
        with pytest.raises(
            ConfigError, match=r"2 processes: set nodesplitter=webdataset.split_by_node and data.presharded=true"
        ):
            opened(made(), 2, presharded=presharded, train=train)
    for fixed in (made(nodesplitter=None), made(nodesplitter=webdataset.split_by_node)):
        assert len(opened(fixed, 2, presharded=presharded)) == 2
    assert len(opened(made(), 1, presharded=presharded)) == 1


def test_the_webdataset_inside_a_webloader_is_refused_too() -> None:
    webdataset = pytest.importorskip("webdataset")
    loader = webdataset.WebLoader(
        webdataset.WebDataset(["missing.tar"], shardshuffle=False), batch_size=None
    ).unbatched()
    with pytest.raises(ConfigError, match="a WebDataset without a nodesplitter"):
        on_ranks(2, lambda rank, reduce: sharded(loader, plan(2), rank, reduce))
