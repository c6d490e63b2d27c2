"""Time and memory until the first batch of a large shuffled data set, and the cost of a random seed for each sample.

    python benchmarks/large_data.py [--samples N] [--rounds N]

Each contestant of the first table reads its first batch in a process of its own. Those of the second table read batches
in turns: as the Trainer does, as it does in a run of version 2 of the order, with a loop that seeds each generator by its own
function, and with a plain loop. The samples draw a number from the generators that are named.
Exits with 1 if a goal is missed by more than the noise.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

import machine
from distributed.backends._torch.fetching import Fetcher
from distributed.backends._torch.loading import shard
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.data import sample_seeds
from distributed.state import DATA_VERSION, DataRole, WorkerContext
from goals import Goal, verdicts

BATCH = 32
LIMITS = {"first batch s": 1, "MB per rank": 10}  # of the Trainer
TRAINER, RESUMED = "Trainer", "Trainer, resumed at 90 %"
SEED_LIMIT_US = 5  # for the seeds of one sample
DRAWS: dict[str, tuple[Callable[[], Any], ...]] = {
    "nothing": (),
    "torch": (lambda: torch.rand(()),),
    "numpy": (numpy.random.random,),
    "random": (random.random,),
    "all three": (lambda: torch.rand(()), numpy.random.random, random.random),
}
# The functions that seed what `DRAWS` draw from
SEEDS: dict[str, tuple[Callable[[int], Any], ...]] = {
    "nothing": (),
    "torch": (torch.default_generator.manual_seed,),
    "numpy": (lambda number: numpy.random.seed(number >> 32),),
    "random": (random.seed,),
}
SEEDS["all three"] = (*SEEDS["torch"], *SEEDS["numpy"], *SEEDS["random"])


class Numbers(Dataset[int]):
    """Item i is the number i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def by_dataloader(count: int) -> Iterator[Any]:
    """Return the batches of a plain DataLoader."""
    return iter(DataLoader(Numbers(count), BATCH, shuffle=True))


def by_trainer(count: int, version: int, skip: int = 0) -> Iterator[Any]:
    """Return the batches that the Trainer reads on one of two ranks, after `skip` samples."""
    data = shard(
        Numbers(count), batch=BatchPlan(BATCH, 1, 2, 2 * BATCH), context=WorkerContext(0, 1, 0, 1, 0, "cpu"),
        config=DistributedConfig(shuffle=True), options=DataOptions(), role=DataRole.TRAINING, reduce=of_two_ranks,
    )  # fmt: skip
    data.use_version(version)
    return data.epoch(0, skip)


def of_two_ranks(sums: Any) -> dict[str, float]:
    """Return what two ranks with the same length of data agree on."""
    length = sums["0.0"]
    return {"0.0": length, "1.0": length}


def contestants(count: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """Return by name how the batches are read."""
    late = count * 9 // 10 // (2 * BATCH) * 2 * BATCH
    return {
        "DataLoader(shuffle=True)": lambda: by_dataloader(count),
        "Trainer, a run of version 1": lambda: by_trainer(count, 1),
        TRAINER: lambda: by_trainer(count, DATA_VERSION),
        RESUMED: lambda: by_trainer(count, DATA_VERSION, late),
    }


def first_batch(name: str, count: int, results: Any) -> None:
    """Put (seconds until the first batch, megabytes that the process has grown by at most) into `results`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    next(contestants(count)[name]())
    seconds = time.perf_counter() - begin
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def first_batches(count: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds until the first batch, megabytes) of each round, by contestant."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants(count)}
    for name, values in found.items():
        for _ in range(rounds):
            results = context.Queue()
            child = context.Process(target=first_batch, args=(name, count, results))
            child.start()
            values.append(results.get())
            child.join()
    return found


def first_batch_rows(found: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    """Return the rows of the first table."""
    rows = [["", *LIMITS]]
    for name, values in found.items():
        seconds, megabytes = (statistics.median(each) for each in zip(*values, strict=True))
        rows.append([name, f"{seconds:.4f}", f"{megabytes:.1f}"])
    return rows


def first_batch_goals(found: dict[str, list[tuple[float, float]]]) -> list[Goal]:
    """Return the goals of the Trainer's first batch, which are judged without noise."""
    return [
        Goal(f"{name}: {what}", limit, list(figures), [0.0], par=0.0)
        for name in (TRAINER, RESUMED)
        for (what, limit), figures in zip(LIMITS.items(), zip(*found[name], strict=True), strict=True)
    ]


class Drawing(Numbers):
    """Item i is the number i, and draws random numbers."""

    def __init__(self, draws: tuple[Callable[[], Any], ...]) -> None:
        super().__init__(BATCH)
        self.draws = draws

    def __getitem__(self, index: int) -> int:
        for draw in self.draws:
            draw()
        return index


class SeedCosts(NamedTuple):
    """Microseconds of CPU for a sample over a plain loop, one value per round."""

    trainer: list[float]
    earlier: list[float]  # of the Trainer in a run of version 2 of the order
    own: list[float]  # of a loop that seeds each generator with its own function
    again: list[float]  # of a second plain loop


def seed_costs(rounds: int, calls: int = 200) -> dict[str, SeedCosts]:
    """Return the costs by what a sample draws from. In a round, each loop reads `calls` batches, one loop after the other."""
    found = {name: SeedCosts([], [], [], []) for name in DRAWS}
    keys = list(range(BATCH))
    for name, costs in found.items():
        data = Drawing(DRAWS[name])
        fetch = Fetcher(data, list, 0, train=True)
        fetch(0, keys, keys)  # which finds out what the samples draw from
        loops = (
            functools.partial(fetch, 0, keys, keys), functools.partial(fetch, 0, keys, keys, 2),
            functools.partial(read_seeded, data, SEEDS[name]), functools.partial(read, data),
        )  # fmt: skip
        for _ in range(rounds):
            *seeded, plain, second = (1e6 * cpu_of(work, calls) / BATCH for work in (*loops, loops[-1]))
            for values, took in zip(costs, (*seeded, second), strict=True):
                values.append(took - plain)
    return found


def seed_goals(found: dict[str, SeedCosts]) -> list[Goal]:
    """Return the goals of the random seeds."""
    return [
        Goal(f"seeds, {name}: us", SEED_LIMIT_US, each.trainer, each.again, par=0.0) for name, each in found.items()
    ]


def read(data: Dataset[int]) -> list[int]:
    return [data[key] for key in range(BATCH)]


def read_seeded(data: Dataset[int], seeds: tuple[Callable[[int], Any], ...]) -> list[int]:
    items = []
    for key, number in enumerate(sample_seeds(0, 0, range(BATCH))):
        for seed in seeds:
            seed(number)
        items.append(data[key])
    return items


def cpu_of(work: Callable[[], Any], calls: int) -> float:
    """Return the seconds of CPU that a call takes."""
    before = time.thread_time()
    for _ in range(calls):
        work()
    return (time.thread_time() - before) / calls


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{options.samples} samples, batch {BATCH}, median of {options.rounds} rounds\n")
    batches = first_batches(options.samples, options.rounds)
    print(machine.table(first_batch_rows(batches)))
    seeds = seed_costs(5 * options.rounds)
    rows = [
        ["a sample draws from", "us", "version 2 us", "seeded by hand us"],
        *([name, *(f"{statistics.median(values):.1f}" for values in each[:3])] for name, each in seeds.items()),
    ]
    goals = [*first_batch_goals(batches), *seed_goals(seeds)]
    print(f"\n{machine.table(rows)}\n\n{verdicts(goals)}\n\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
