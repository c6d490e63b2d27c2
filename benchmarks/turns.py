"""Lets contestants train in turns, step by step comparable, and times each of their steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

Marks = list[tuple[float, float]]  # (main-thread CPU, wall) before each step and after the last, in seconds
Turn = Callable[[int], Marks]


@dataclasses.dataclass
class Session:
    """Our Trainer against other loops in one process group. The first round is warm-up and is not kept."""

    ours: str
    others: dict[str, Turn]
    steps: int  # per turn
    rounds: int
    turns: dict[str, list[dict[str, float]]] = dataclasses.field(default_factory=dict)

    def around(self, groups: Iterator[Any]) -> Iterator[Any]:
        """Our batches; before each turn of ours everybody else has one. A step is what lies between two requests."""
        import torch.distributed as dist

        for round_number in range(self.rounds):
            for name, turn in self.others.items():
                dist.barrier()
                self._keep(round_number, name, turn(self.steps))
            dist.barrier()
            marks: Marks = []
            for _ in range(self.steps):
                marks.append(now())
                yield next(groups)
            marks.append(now())
            self._keep(round_number, self.ours, marks)

    def _keep(self, round_number: int, name: str, marks: Marks) -> None:
        if round_number > 0:
            self.turns.setdefault(name, []).append(seconds_per_step(marks))


def now() -> tuple[float, float]:
    """The two clocks."""
    return time.thread_time(), time.perf_counter()


def seconds_per_step(marks: Marks) -> dict[str, float]:
    """Of one turn: CPU mean and 10th percentile, wall median."""
    cpu = sorted(after[0] - before[0] for before, after in itertools.pairwise(marks))
    wall = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    return {"mean": sum(cpu) / len(cpu), "p10": cpu[len(cpu) // 10], "wall": statistics.median(wall)}


@contextlib.contextmanager
def taking_turns(session: Session, backend: str) -> Iterator[None]:
    """Within it, the training batches that `backend` cuts come by way of `session.around`."""
    from distributed.backends import backend_class

    cls = backend_class(backend)
    original = cls.shard

    def shard(self: Any, data: Any, batch: Any, train: bool) -> Any:
        sharded = original(self, data, batch, train)
        if train:
            inner = sharded.epoch
            sharded.epoch = lambda epoch, skip=0: session.around(inner(epoch, skip))
        return sharded

    cls.shard = shard
    try:
        yield
    finally:
        cls.shard = original
