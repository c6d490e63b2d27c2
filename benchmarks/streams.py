"""CPU time of one rank for each sample that it uses of a stream, and what a resume at 90 % of a long stream costs.

    python benchmarks/streams.py [--samples N] [--long N] [--rounds N]

Each contestant is rank 0 of its world, in a process of its own. The other ranks would find the same numbers.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import multiprocessing
import resource
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset

import machine
from distributed.backends._torch.loading import shard
from distributed.backends.base import ShardedData
from distributed.config.data import DataOptions
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.state import DataRole, WorkerContext
from goals import Goal, verdicts

BATCH, WORLDS = 32, (1, 2, 4, 8)
WARM_UP = 20  # updates that are not measured
RECORDS = [zlib.compress(numpy.random.RandomState(i).randint(0, 9, 8192, "uint8").tobytes()) for i in range(64)]


class Plain(IterableDataset[Any]):
    """Compressed records, which take about as long to decode as a small image."""

    index, parts, begin, at = 0, 1, 0, 0

    def __init__(self, count: int, is_light: bool = False) -> None:
        self.count, self.is_light = count, is_light

    def __iter__(self) -> Iterator[Any]:
        for position in range(self.count)[self.index :: self.parts][self.begin :]:
            self.at += 1
            raw = RECORDS[position % 64]
            yield position if self.is_light else torch.frombuffer(bytearray(zlib.decompress(raw)), dtype=torch.uint8)


class Sharding(Plain):
    """Records of which a part can be read."""

    def shard(self, index: int, count: int) -> Sharding:
        part = copy.copy(self)
        part.index, part.parts = index, count
        return part


class Skipping(Sharding):
    """Records that can be read from any position on."""

    def skip(self, count: int) -> Skipping:
        rest = copy.copy(self)
        rest.begin = count
        return rest


class Telling(Sharding):
    """Records that tell where they stand."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = self.at = state["at"]


def rank_0(data: Any, world: int) -> ShardedData:
    """Return the part of rank 0. All ranks find the same numbers."""

    def reduce(sums: Any) -> dict[str, float]:
        return {name: sums[f"0.{name.partition('.')[2]}"] for name in sums}

    return shard(
        data, batch=BatchPlan(BATCH, 1, world, BATCH * world), context=WorkerContext(0, world, 0, world, 0, "cpu"),
        config=DistributedConfig(), options=DataOptions(), role=DataRole.TRAINING, reduce=reduce,
    )  # fmt: skip


def per_sample(kind: type[Plain], world: int, count: int) -> float:
    """Return the CPU time in us for each sample that rank 0 uses."""
    updates = rank_0(kind(count * world), world).epoch(0)
    for _ in itertools.islice(updates, WARM_UP):  # the first updates check the parts
        pass
    begin, used = time.process_time(), 0
    for update in updates:
        used += update.micro_batches[0].num_samples
    return (time.process_time() - begin) / used * 1e6


def resumed(kind: type[Plain], count: int) -> tuple[float, float]:
    """Return (seconds until the first batch at 90 %, megabytes that the process has grown by at most)."""
    late = count * 9 // 10 // (2 * BATCH) * 2 * BATCH
    data = rank_0(kind(count, is_light=True), 2)
    if kind is Telling:
        part = {"epoch": 0, "samples": late, "parts": [[0, 2, late // 2, {"at": late // 2}]]}
        data.seek({"epoch": 0, "samples": late, "ranks": [part, part]})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    next(data.epoch(0, late))
    seconds = time.perf_counter() - begin
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in a process of its own. Raises its error, or BrokenProcessPool if the process ends."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cpu_times(count: int, rounds: int) -> tuple[list[list[str]], list[Goal]]:
    """Return the rows of the table, and the goals for the ratio to one process with `shard`."""
    kinds = {"without shard": Plain, "with shard": Sharding, "with shard again": Sharding}
    worlds = {"with shard again": (1,)}
    found: dict[tuple[str, int], list[float]] = {
        (name, world): [] for name in kinds for world in worlds.get(name, WORLDS)
    }
    for _ in range(rounds):
        for (name, world), values in found.items():  # in turns
            values.append(in_process(per_sample, kinds[name], world, count))
    one = found["with shard", 1]
    ratios = {key: [value / each for value, each in zip(values, one, strict=True)] for key, values in found.items()}
    rows = [["", *(f"{world} ranks: us, x" for world in WORLDS)]]
    for name in list(kinds)[:2]:
        cells = (f"{statistics.median(found[name, n]):.0f}, {machine.spread(ratios[name, n])}" for n in WORLDS)
        rows.append([name, *cells])
    again = ratios["with shard again", 1]
    return rows, [Goal(f"shard, {n} ranks: CPU x", 1.1, ratios["with shard", n], again) for n in WORLDS[1:]]


def resumes(count: int, rounds: int) -> list[list[str]]:
    """Return the rows of the table."""
    rows = [["", "first batch s", "MB"]]
    kinds = {"no hook": Plain, "shard": Sharding, "shard and state_dict": Telling, "shard and skip": Skipping}
    for name, kind in kinds.items():
        found = [in_process(resumed, kind, count) for _ in range(rounds)]
        seconds, megabytes = (statistics.median(values) for values in zip(*found, strict=True))
        rows.append([name, f"{seconds:.4f}", f"{megabytes:.1f}"])
    return rows


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384, help="samples that each rank uses")
    parser.add_argument("--long", type=int, default=1_000_000, help="samples of the stream that is resumed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.samples <= WARM_UP * BATCH:
        parser.error(f"--samples must be above {WARM_UP * BATCH}, which are not measured")
    rows, goals = cpu_times(options.samples, options.rounds)
    print(f"CPU time per used sample, and in ratio to one rank, median of {options.rounds} rounds\n")
    print(machine.table(rows))
    print(f"\nresume at 90 % of {options.long} samples that are numbers, rank 0 of 2\n")
    print(machine.table(resumes(options.long, options.rounds)))
    print(f"\n{verdicts(goals)}\n\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
