"""Map-style data cut over ranks: every sample once, at any world size, bit for bit what torch's DataLoader gives."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from distributed.backends import twisters
from distributed.backends._torch import sample_rng
from distributed.backends._torch.fetching import indexed_tensors
from distributed.backends._torch.loading import loader_batch_size
from distributed.data import epoch_order, sample_seed
from distributed.errors import ConfigError
from distributed.state import DataRole
from tests.unit.ranks import groups_of_ranks, on_ranks, plan, samples_used, sharded

pytestmark = [
    pytest.mark.timeout(360),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Numbers(Dataset[Any]):
    """Item i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index >= self.count:
            raise IndexError(index)
        self.read.append(index)
        return index


class Draws(Numbers):
    """Items with a draw from each global generator, of the kinds that keep a spare number too."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.randn(2), numpy.random.randn(), random.gauss(0, 1), numpy.random.rand(), random.random()


class DrawsRarely(Numbers):
    """Only one item in eleven draws."""

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1) if index % 11 == 5 else torch.zeros(1)


def numbers(batch: Any) -> list[int]:
    values = batch[0] if isinstance(batch, list | tuple) else batch
    return values.tolist()


def tensors(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count), torch.arange(count) * 0.5)


def generator_states() -> Any:
    state: Any = numpy.random.get_state(legacy=False)
    words = state["state"]["key"].tolist(), state["state"]["pos"], state["has_gauss"], state["gauss"]
    return torch.get_rng_state().tolist(), torch.initial_seed(), random.getstate(), words


def by_sample(ranks: list[list[Any]]) -> dict[int, Any]:
    """Each sample's values, whatever batch it came in."""
    found = {}
    for micro in itertools.chain(*(group.micro_batches for groups in ranks for group in groups)):
        columns = [column.tolist() for column in micro.batch]
        if micro.num_samples:
            found.update({row[0]: row[1:] for row in zip(*columns, strict=True)})
    return found


@pytest.mark.parametrize("dataset", [Numbers, tensors], ids=["items", "tensors"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_union_of_ranks_is_the_global_batch(dataset: Any, world: int) -> None:
    for count, steps, total in itertools.product((1, 5, 24, 37), (1, 2, 3), (None, 11)):
        batch = plan(world, 4 if total is None else -(-11 // (steps * world)), steps, total)
        updates = samples_used(groups_of_ranks(dataset(count), batch, seed=3, epoch=2), numbers)
        order = epoch_order(count, 3, 2, shuffle=True).tolist()
        size = batch.global_batch_size
        assert [sorted(each) for each in updates] == [sorted(order[i : i + size]) for i in range(0, count, size)]


def test_a_resume_at_each_update_equals_the_tail() -> None:
    for world, steps in ((1, 1), (2, 2), (3, 1)):
        batch = plan(world, 12 // world // steps, steps)
        whole = groups_of_ranks(tensors(41), batch, epoch=1)
        for i, skip in enumerate((0, 12, 24, 36, 41)):
            tail = groups_of_ranks(tensors(41), batch, epoch=1, skip=skip)
            expected = samples_used([groups[i:] for groups in whole], numbers)
            assert samples_used(tail, numbers) == expected
            assert [g.position for g in tail[0]] == list(range(skip, 41, 12))


def test_a_resume_reads_nothing_that_was_used() -> None:
    dataset = Numbers(40)
    samples_used(groups_of_ranks(dataset, plan(1, 4), skip=36, shuffle=False), numbers)
    assert dataset.read == [36, 37, 38, 39]


def test_a_resume_with_another_global_batch_goes_on_where_it_stood() -> None:
    updates = samples_used(groups_of_ranks(tensors(20), plan(2, 4), skip=4, shuffle=False), numbers)
    assert [sorted(each) for each in updates] == [list(range(4, 12)), list(range(12, 20))]


def test_empty_slices_run_the_first_sample_with_weight_zero() -> None:
    ranks = groups_of_ranks(tensors(9), plan(4, 2), shuffle=False)
    last = [groups[-1].micro_batches for groups in ranks]
    assert [(micro.num_samples, numbers(micro.batch)) for [micro] in last] == [(1, [8]), (0, [8]), (0, [8]), (0, [8])]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_batches_equal_a_hand_written_loop_with_a_distributed_sampler(world: int) -> None:
    dataset, batch = tensors(48), plan(world, 4)
    for rank, groups in enumerate(groups_of_ranks(DataLoader(dataset, 4), batch)):
        theirs = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, world, rank, shuffle=False))
        ours = [micro.batch for group in groups for micro in group.micro_batches]
        for a, b in zip(ours, theirs, strict=True):
            assert type(a) is type(b)
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def nested_items() -> list[Any]:
    return [{"x": torch.randn(3), "more": (i, float(i), "word"), "array": numpy.arange(i, i + 2)} for i in range(10)]


def batched_items() -> Any:
    return StackDataset(a=tensors(10), b=Numbers(10))


def split_twice() -> Any:
    outer, _ = random_split(tensors(30), [20, 10])
    return Subset(outer, [3, -1, 7, 5, 2, 11, 0, 13, 14, 15])


def float_columns() -> Any:
    return TensorDataset(torch.randn(10, 3, 4), torch.randn(10, 4, 3).transpose(1, 2), torch.rand(10).double())


@pytest.mark.parametrize("make", [nested_items, batched_items, split_twice, float_columns, lambda: torch.randn(10, 3)])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_bit_for_bit_torchs_own(make: Any, workers: int) -> None:
    dataset = make()
    loader = DataLoader(dataset, 4, num_workers=workers)
    [groups] = groups_of_ranks(loader, plan(1, 4))
    expected = list(DataLoader(dataset, 4))
    assert len(groups) == len(expected)
    for group, theirs in zip(groups, expected, strict=True):
        assert_same(group.micro_batches[0].batch, theirs)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    else:
        assert ours == theirs


def test_tensors_are_indexed_at_once_only_where_that_is_the_same() -> None:
    class Sub(TensorDataset):
        pass

    default = DataLoader([0]).collate_fn
    assert indexed_tensors(tensors(4), default) is not None
    assert indexed_tensors(split_twice(), default) is not None
    assert indexed_tensors(tensors(4), list) is None
    for other in (
        Sub(torch.ones(4)),
        TensorDataset(torch.ones(3, 4).t()),
        TensorDataset(torch.ones(4, requires_grad=True)),
    ):
        assert indexed_tensors(other, default) is None


def test_a_custom_collate_function_is_used() -> None:
    loader = DataLoader(Numbers(6), 3, collate_fn=lambda items: {"labels": torch.tensor(items) * 10})
    [groups] = groups_of_ranks(loader, plan(1, 3))
    assert [group.micro_batches[0].batch["labels"].tolist() for group in groups] == [[0, 10, 20], [30, 40, 50]]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("dataset", [Draws, DrawsRarely])
def test_augmentation_is_the_same_at_any_world_size_and_in_workers(dataset: Any, version: int) -> None:
    data, found = dataset(23), []
    random.gauss(0, 1), numpy.random.randn()  # leave a spare number of each in store
    before = generator_states()
    for world, workers in ((1, 0), (3, 0), (1, 2), (2, 1)):
        loader = DataLoader(data, 4, shuffle=True, num_workers=workers)
        found.append(by_sample(groups_of_ranks(loader, plan(world, 12 // world), epoch=1, seed=5, version=version)))
        assert generator_states() == before
    assert found[0].keys() == set(range(23))
    assert all(each == found[0] for each in found[1:])
    assert found[0] != by_sample(groups_of_ranks(data, plan(1, 12), epoch=2, seed=5, version=version))
    tail = by_sample(groups_of_ranks(data, plan(1, 12), epoch=1, seed=5, version=version, skip=12))
    assert found[0] == {**found[0], **tail}


def test_neighbouring_samples_draw_differently() -> None:
    found = by_sample(groups_of_ranks(Draws(50), plan(1, 10)))
    for column in range(5):
        assert len({str(values[column]) for values in found.values()}) == 50


def test_training_and_evaluation_draw_differently() -> None:
    seen = [
        by_sample(groups_of_ranks(Draws(8), plan(), train=train, **how))
        for train, how in ((True, {"shuffle": False}), (False, {}))
    ]
    assert seen[0].keys() == seen[1].keys()
    assert seen[0] != seen[1]


def test_a_collate_function_that_draws_repeats_itself() -> None:
    loader = DataLoader(Numbers(8), 4, collate_fn=lambda items: torch.rand(len(items)) + random.random())
    before = generator_states()
    runs = [groups_of_ranks(loader, plan()) for _ in range(2)]
    assert generator_states() == before
    first, again = ([micro.batch.tolist() for group in groups for micro in group.micro_batches] for [groups] in runs)
    assert first == again
    assert first[0] != first[1]


def test_another_numpy_bit_generator_is_seeded_and_put_back() -> None:
    usual = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        before = str(numpy.random.get_state(legacy=False))
        runs = [by_sample(groups_of_ranks(Draws(9), plan(world, 6 // world))) for world in (1, 2)]
        assert str(numpy.random.get_state(legacy=False)) == before
    finally:
        numpy.random.set_bit_generator(usual)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1), lambda: torch.randn(1), random.random, lambda: random.gauss(0, 1), numpy.random.rand,
        numpy.random.randn, lambda: [torch.rand(1) for _ in range(624)],
        lambda: [random.getrandbits(32) for _ in range(624)],
    ],
)  # fmt: skip
def test_every_draw_is_seen_and_undone(draw: Any) -> None:
    with sample_rng.preserved():
        for spare in range(2):
            if spare:
                torch.randn(1), random.gauss(0, 1), numpy.random.randn()
            before, state = generator_states(), sample_rng.save()
            assert sample_rng.drawn(state) == 0
            draw()
            assert sample_rng.drawn(state) in (sample_rng.TORCH, sample_rng.PYTHON, sample_rng.NUMPY)
            sample_rng.restore(state)
            assert sample_rng.drawn(state) == 0
            assert generator_states() == before


def test_the_state_of_the_generators_is_found_in_memory_here() -> None:
    assert twisters.memory() is not None


def split_mix(seed: int, count: int) -> list[int]:
    """The first numbers of SplitMix64, as Steele, Lea and Flood write it down, each cut into its low and its high half."""
    halves = []
    for number in range(1, count + 1):
        word = (seed + number * 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
        halves += [word % 2**32, word >> 32]
    return halves


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("which", [sample_rng.ALL, sample_rng.PYTHON, sample_rng.NUMPY, sample_rng.TORCH])
def test_a_sample_begins_with_the_words_of_its_seed(
    monkeypatch: pytest.MonkeyPatch, which: int, is_found: bool
) -> None:
    seeds = [sample_seed(0, 0, position) for position in range(70)]
    with sample_rng.preserved(), monkeypatch.context() as patched:
        if not is_found:
            patched.setattr(twisters, "memory", lambda: None)
        begin = sample_rng.seeder(seeds, which, 3)
        for number in (0, 31, 32, 69, 0):
            random.seed(1), numpy.random.seed(1)
            torch.randn(1), random.gauss(0, 1), numpy.random.randn()  # leave a spare number of each in store
            before = generator_states()
            begin(number)
            words = split_mix(seeds[number], 624)
            at_torch, initial, of_python, of_numpy = generator_states()
            if which & sample_rng.PYTHON:
                assert of_python == (3, (*words[:624], 0), None)
            else:
                assert of_python == before[2]
            if which & sample_rng.NUMPY:
                name, state, *rest = numpy.random.get_state()
                assert (name, state.tolist(), rest[:2]) == ("MT19937", words[624:], [0, 0])
            else:
                assert of_numpy == before[3]
            if which & sample_rng.TORCH:
                assert initial == seeds[number] % 2**32
            else:
                assert (at_torch, initial) == before[:2]


@pytest.mark.parametrize("version", [1, 2])
def test_the_samples_of_an_earlier_version_draw_their_numbers(version: int) -> None:
    def drawn(seed: int) -> list[Any]:
        with sample_rng.preserved():
            torch.manual_seed(seed % 2**32), numpy.random.seed(seed >> 32), random.seed(seed)
            return [each.tolist() if isinstance(each, torch.Tensor) else each for each in Draws(1)[0][1:]]

    found = by_sample(groups_of_ranks(Draws(9), plan(2), epoch=1, seed=5, shuffle=False, version=version))
    for position, values in found.items():
        assert list(values) == drawn(sample_seed(5, 1, position))


def test_loader_processes_that_go_on_draw_the_numbers_of_the_version() -> None:
    loader = DataLoader(Draws(9), 4, num_workers=1, persistent_workers=True)
    part, found = sharded(loader, plan(), shuffle=False), []
    for version in (3, 2, 3):
        part.use_version(version)
        found.append(by_sample([list(part.epoch(0))]))
    part.close()
    expected = [by_sample(groups_of_ranks(Draws(9), plan(), shuffle=False, version=version)) for version in (2, 3)]
    assert found == [expected[1], expected[0], expected[1]]
    assert expected[0] != expected[1]


def test_shuffle_follows_config_then_loader_and_never_evaluation() -> None:
    data = tensors(16)
    shuffled = epoch_order(16, 0, 0, shuffle=True).tolist()

    def order(loader: Any, **settings: Any) -> list[int]:
        return list(itertools.chain(*samples_used(groups_of_ranks(loader, plan(), **settings), numbers)))

    in_order = list(range(16))
    assert order(data) == shuffled
    assert order(data, train=False) == in_order
    assert order(DataLoader(data)) == in_order
    assert order(DataLoader(data, shuffle=True)) == shuffled
    assert order(DataLoader(data, shuffle=True), train=False, shuffle=True) == in_order
    assert order(DataLoader(data, shuffle=True), shuffle=False) == in_order
    assert order(DataLoader(data), shuffle=True) == shuffled
    assert order(DataLoader(data, sampler=DistributedSampler(data, 4, 1))) == shuffled
    assert order(DataLoader(data, sampler=DistributedSampler(data, 4, 1, shuffle=False))) == in_order


def samplers(data: Any) -> list[Any]:
    weights = torch.arange(1.0, 21.0)
    return [
        WeightedRandomSampler(weights, 18),
        WeightedRandomSampler(weights, 18, generator=torch.Generator().manual_seed(9)),
        SubsetRandomSampler(range(3, 20)),
        RandomSampler(data, replacement=True, num_samples=25),
        RandomSampler(data, num_samples=7),
    ]


def test_other_samplers_are_drawn_with_our_seed_and_sliced() -> None:
    data = tensors(20)
    for sampler in samplers(data):
        loader = DataLoader(data, 4, sampler=sampler)
        own = getattr(sampler, "generator", None)
        before = generator_states(), own.get_state().tolist() if own is not None else None
        streams = []
        for world, epoch in ((1, 1), (3, 1), (1, 2)):
            part = groups_of_ranks(loader, plan(world, 12 // world), epoch=epoch)
            streams.append([sorted(each) for each in samples_used(part, numbers)])
        assert sum(map(len, streams[0])) == len(sampler)
        assert streams[0] == streams[1]
        assert streams[0] != streams[2]
        assert before == (generator_states(), own.get_state().tolist() if own is not None else None)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(3))


class Announced(Sampler[int]):
    """Yields its epoch again and again."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 5)


def test_a_samplers_set_epoch_is_called() -> None:
    part = sharded(DataLoader(Numbers(9), sampler=Announced()))
    assert numbers(next(part.epoch(7)).micro_batches[0].batch) == [7, 7, 7, 7]
    assert part.num_samples == 5


def test_an_item_of_a_batch_sampler_is_one_update() -> None:
    lists = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12], [13, 14]]
    for world, steps in ((1, 1), (2, 1), (3, 2)):
        loader = DataLoader(tensors(15), batch_sampler=lists)
        updates = samples_used(groups_of_ranks(loader, plan(world, 2, steps)), numbers)
        assert [sorted(each) for each in updates] == lists
        tail = samples_used(groups_of_ranks(loader, plan(world, 2, steps), skip=6), numbers)
        assert [sorted(each) for each in tail] == lists[2:]
    part = sharded(DataLoader(tensors(15), batch_sampler=lists))
    assert (part.num_samples, part.updates_per_epoch) == (15, 4)
    [first] = next(part.epoch(0)).micro_batches
    assert first.num_samples == 5  # its size is the sampler's affair, not ours


def test_the_batch_equation_tells_of_a_batch_samplers_largest_item() -> None:
    lists = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12], [13, 14]]
    batch = on_ranks(
        2, lambda rank, reduce: sharded(DataLoader(tensors(15), batch_sampler=lists), plan(2, 64, 2), rank, reduce)
    )[1].batch
    assert str(batch) == ("global_batch_size 7 <= batch_size 2 x gradient_accumulation_steps 2 x data_parallel_size 2")


def test_drop_last_counts_in_training_only() -> None:
    loader = DataLoader(tensors(22), 4, drop_last=True)
    for world in (1, 2):
        assert len(groups_of_ranks(loader, plan(world, 4))[0]) == 22 // (4 * world)
        assert sum(map(len, samples_used(groups_of_ranks(loader, plan(world, 4), train=False), numbers))) == 22
    assert sharded(loader).num_samples == 20
    with pytest.raises(ConfigError, match="drop_last leaves none of 22 samples with global_batch_size=40"):
        sharded(loader, plan(1, 40))


class SeesWorker(Numbers):
    """Items are (index, whether the worker shows this very data set, what the init function set, the worker's id)."""

    mark = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, info is not None and info.dataset is self, self.mark, info.id if info else -1


def set_mark(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.mark = 40 + worker_id


def test_workers_see_the_users_data_set_and_init_function() -> None:
    loader = DataLoader(SeesWorker(8), 2, num_workers=2, worker_init_fn=set_mark, prefetch_factor=3)
    rows = by_sample(groups_of_ranks(loader, plan(1, 2)))
    assert rows == {i: (True, 40 + i // 2 % 2, i // 2 % 2) for i in range(8)}


def test_persistent_workers_serve_many_epochs_and_close_ends_them() -> None:
    data = Draws(24)
    part = sharded(DataLoader(data, 4, shuffle=True, num_workers=2, persistent_workers=True), plan())
    next(part.epoch(0))  # left in the middle
    pids = worker_pids(part)
    for epoch in (1, 2):
        expected = by_sample(groups_of_ranks(data, plan(), epoch=epoch))
        assert by_sample([list(part.epoch(epoch))]) == expected
        assert worker_pids(part) == pids
    processes = workers(part)
    part.close()
    assert all(not process.is_alive() for process in processes)


def workers(part: Any) -> list[Any]:
    return list(part._loader._iterator._workers)


def worker_pids(part: Any) -> list[int]:
    return [process.pid for process in workers(part)]


def test_close_ends_workers_of_an_unfinished_epoch() -> None:
    part = sharded(DataLoader(Numbers(400), 4, num_workers=2), plan())
    groups = part.epoch(0)
    next(groups)
    running = multiprocessing.active_children()
    assert len(running) == 2
    part.close()
    assert not any(process.is_alive() for process in running)


def test_a_failing_sample_shows_its_own_error() -> None:
    class Fails(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample {index} is broken")

    for workers, stay in ((0, False), (1, False), (1, True)):
        part = sharded(DataLoader(Fails(4), 4, num_workers=workers, persistent_workers=stay), plan())
        with pytest.raises(ValueError, match="sample 0 is broken") as caught:
            next(part.epoch(0))
        part.close()
        assert not multiprocessing.active_children()  # though the traceback still holds the loader's iterator
        assert caught.value.__traceback__ is not None


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class OwnIter(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class PartOnly(Sampler[int]):
    num_replicas, rank = 2, 0

    def __iter__(self) -> Iterator[int]:
        return iter([0, 2])


def stream_of_pairs() -> Iterator[Any]:
    yield 1, 2


BAD = [
    (NoLength(), {}, "NoLength has __getitem__ but no length"),
    (3, {}, r"int is not a data set: give a DataLoader, or .*TensorDataset\(inputs, targets\)"),
    ("file.csv", {}, "str is not a data set"),
    ({"train": [1]}, {}, "dict is not a data set: pick one of its splits"),
    (
        {"x": torch.ones(3), "y": torch.ones(3)},
        {},
        r"a dict of arrays is not a data set: give TensorDataset\(inputs, targets\)",
    ),
    (
        [torch.ones(3, 2), torch.ones(3)],
        {},
        r"a list of 2 arrays is not a data set .*: give TensorDataset\(inputs, targets\)",
    ),
    ([torch.ones(3, 2), torch.ones(3, 2)], {}, "a list of 2 arrays is not a data set"),
    (DataLoader([torch.ones(3, 2), torch.ones(3)]), {}, "a list of 2 arrays is not a data set"),  # type: ignore[arg-type]
    ([numpy.ones((3, 2)), numpy.ones((3, 1)), numpy.ones(3)], {}, "a list of 3 arrays is not a data set"),
    (
        torch.ones(3, 2),
        {},
        r"train_data: a tensor is not a data set: give TensorDataset\(inputs, targets\), or DataLoader",
    ),
    (numpy.ones((3, 2)), {}, "train_data: an array is not a data set"),
    (None, {}, "train_data: None is not a data set: give TensorDataset"),
    (Path("file.csv"), {}, "PosixPath is not a data set: load the data that it names and give TensorDataset"),
    (TensorDataset, {}, "TensorDataset is a class: make an object of it"),
    (stream_of_pairs, {}, "stream_of_pairs is a function: call it, or give an IterableDataset"),
    ({1, 2}, {}, "a set has no order: give a list"),
    (pandas.DataFrame({"x": [1.0, 2.0]}), {}, r"a DataFrame is not a data set: give its columns as arrays \(.to_numpy"),
    (pandas.Series([1.0, 2.0]), {}, "a Series is not a data set"),
    (iter(DataLoader(Numbers(4))), {}, "an iterator of a DataLoader yields whole batches: give the DataLoader itself"),
    ((torch.ones(3), torch.ones(3)), {}, "a tuple of arrays is not a data set"),
    (
        [DataLoader(TensorDataset(torch.ones(3)))] * 2,
        {},
        "a list of data sets is not a data set: join them with torch.utils.data.Conc",
    ),
    ([], {}, "the data set is empty"),
    (DataLoader(Numbers(4), batch_size=None), {}, r"DataLoader\(batch_size=None\) .* set batch_size in the loader"),
    (DataLoader(Numbers(4), sampler=Endless()), {}, "Endless yields more than 1000000 items"),
    (DataLoader(Numbers(4), sampler=PartOnly()), {}, "PartOnly yields one rank's part only.*data.presharded=true"),
    (OwnIter(Numbers(4)), {}, "OwnIter has its own __iter__"),
    (DataLoader(Numbers(4), sampler=[1, 2]), {"shuffle": True}, "shuffle=True contradicts the loader's list"),
    (DataLoader(Numbers(4), batch_sampler=[[1, 2]]), {"batch_size": 8}, "batch_size=8 contradicts the loader's list"),
]


@pytest.mark.parametrize(("data", "settings", "message"), BAD)
def test_bad_data_is_refused_with_the_fix(data: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharded(data, **settings)


def test_samples_that_are_tensors_are_data() -> None:
    same, ragged = [torch.ones(3, 2)] * 4, [torch.ones(3), torch.ones(3, 2)]
    assert sharded(same).num_samples == 4
    assert sharded(torch.ones(4, 2), role=DataRole.PREDICTION).num_samples == 4
    assert sharded(DataLoader(torch.ones(4, 2))).num_samples == 4  # type: ignore[arg-type]
    assert sharded(DataLoader(ragged, collate_fn=list)).num_samples == 2  # type: ignore[arg-type]
    assert sharded([(torch.ones(3), torch.ones(3)), (torch.ones(3), torch.ones(3))]).num_samples == 2


def test_ranks_with_different_data_are_refused_on_all_of_them() -> None:
    def work(rank: int, reduce: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            sharded(tensors(10 + rank), plan(2), rank, reduce)
        return str(caught.value)

    [first, second] = on_ranks(2, work)
    assert first == second
    assert "different lengths" in first
    assert "data.presharded=true" in first


def test_a_sampler_that_differs_between_ranks_is_refused() -> None:
    own = random.Random(1)

    class Unseeded(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(own.sample(range(50), 20))

    with pytest.raises(ConfigError, match="the ranks draw different samples from Unseeded"):
        groups_of_ranks(DataLoader(tensors(50), sampler=Unseeded()), plan(2))


def test_a_loaders_batch_size_counts_unless_it_is_the_default() -> None:
    data = tensors(8)
    assert loader_batch_size(DataLoader(data, 4)) == 4
    assert loader_batch_size(DataLoader(data)) is None
    assert loader_batch_size(DataLoader(data, batch_size=None)) is None
    assert loader_batch_size(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))) is None
    assert loader_batch_size(data) is None
