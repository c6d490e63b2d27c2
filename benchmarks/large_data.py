"""Time and memory until the first batch of a large shuffled data set, and the cost of a random seed for each sample.

    python benchmarks/large_data.py [--samples N] [--rounds N]

Each contestant of the first table reads its first batch in a process of its own. Those of the second table read batches
in turns, as the Trainer does and with a plain loop. The samples draw a number from the generators that are named.
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
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

import machine
from distributed.backends._torch.fetching import Fetcher
from distributed.backends._torch.loading import shard
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.state import DATA_VERSION, DataRole, WorkerContext

BATCH = 32
SEED_LIMIT_US = 5  # for the seeds of one sample
DRAWS: dict[str, tuple[Callable[[], Any], ...]] = {
    "nothing": (),
    "torch": (lambda: torch.rand(()),),
    "numpy": (numpy.random.random,),
    "random": (random.random,),
    "all three": (lambda: torch.rand(()), numpy.random.random, random.random),
}


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
        "Trainer": lambda: by_trainer(count, DATA_VERSION),
        "Trainer, resumed at 90 %": lambda: by_trainer(count, DATA_VERSION, late),
    }


def first_batch(name: str, count: int, results: Any) -> None:
    """Put (seconds until the first batch, megabytes that the process has grown by at most) into `results`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    next(contestants(count)[name]())
    seconds = time.perf_counter() - begin
    results.put((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))


def first_batches(count: int, rounds: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = [["", "first batch s", "MB per rank"]]
    context = multiprocessing.get_context("spawn")
    for name in contestants(count):
        found = []
        for _ in range(rounds):
            results = context.Queue()
            child = context.Process(target=first_batch, args=(name, count, results))
            child.start()
            found.append(results.get())
            child.join()
        seconds, megabytes = (statistics.median(values) for values in zip(*found, strict=True))
        rows.append([name, f"{seconds:.4f}", f"{megabytes:.1f}"])
    return rows


class Drawing(Numbers):
    """Item i is the number i, and draws random numbers."""

    def __init__(self, draws: tuple[Callable[[], Any], ...]) -> None:
        super().__init__(BATCH)
        self.draws = draws

    def __getitem__(self, index: int) -> int:
        for draw in self.draws:
            draw()
        return index


def seed_costs(rounds: int) -> dict[str, float]:
    """Return how many microseconds of CPU a sample costs over a plain loop, by what it draws from. Median over the rounds."""
    costs: dict[str, list[float]] = {name: [] for name in DRAWS}
    keys = list(range(BATCH))
    for name, draws in DRAWS.items():
        data = Drawing(draws)
        fetch = Fetcher(data, list, 0, train=True)
        fetch(0, keys, keys)  # which finds out what the samples draw from
        for _ in range(rounds):
            seeded_s = cpu_of(functools.partial(fetch, 0, keys, keys))
            costs[name].append(seeded_s - cpu_of(functools.partial(read, data)))
    return {name: 1e6 * statistics.median(found) / BATCH for name, found in costs.items()}


def read(data: Dataset[int]) -> list[int]:
    return [data[key] for key in range(BATCH)]


def cpu_of(work: Callable[[], Any], calls: int = 200) -> float:
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
    print(machine.table(first_batches(options.samples, options.rounds)))
    costs = seed_costs(5 * options.rounds)
    rows = [[name, f"{cost:.1f}", "" if cost <= SEED_LIMIT_US else "MISSED"] for name, cost in costs.items()]
    print(f"\n{machine.table([['a sample draws from', 'us', f'at most {SEED_LIMIT_US}'], *rows])}")
    print(f"\n{machine.describe()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
