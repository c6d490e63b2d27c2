"""Let contestants train in turns with comparable steps, and time each of their steps."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Marks = list[tuple[float, float]]  # (CPU of the training thread, wall) before each step and after the last, in seconds
Turn = Callable[[int], Marks]


def compete(contestants: dict[str, Turn], steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Run `rounds` rounds, in which each contestant makes `steps` updates on all ranks. The first round is warm-up.

    The order rotates from round to round, so that the predecessor of a contestant has no influence on average.
    """
    import torch.distributed as dist

    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for round_number in range(rounds):
        names = list(contestants)
        first = round_number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            marks = contestants[name](steps)
            if round_number > 0:
                turns[name].append(seconds_per_step(marks))
    return turns


class TrainerTurns:
    """A Trainer's `fit` in a thread of its own, which trains only during its turn.

    A step is the time between two requests for a batch: the update, the callbacks, and a log line if one is due.
    """

    def __init__(self, fit: Callable[[], Any]) -> None:
        self._fit = fit
        self._steps = 0
        self._marks: Marks = []
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._done.acquire()  # wait until the first batch is requested
        if not self._thread.is_alive():
            raise RuntimeError("fit failed before its first batch")

    def turn(self, steps: int) -> Marks:
        """Run `steps` updates. Return the clocks before each and after the last."""
        self._steps = steps
        self._go.release()
        self._done.acquire()
        if not self._thread.is_alive():
            raise RuntimeError("fit ended before its turns did")
        return self._marks

    def end(self) -> None:
        """End the turns and let `fit` finish."""
        self._steps = 0
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            with _batches_by_way_of(self._around):
                self._fit()
        finally:
            self._done.release()  # release the waiting thread if fit failed

    def _around(self, groups: Iterator[Any]) -> Iterator[Any]:
        while True:
            self._done.release()
            self._go.acquire()
            if not self._steps:
                return
            self._marks = []
            for _ in range(self._steps):
                self._marks.append(now())
                yield next(groups)
            self._marks.append(now())


def now() -> tuple[float, float]:
    """Return the CPU clock of this thread and the wall clock, in seconds."""
    return time.thread_time(), time.perf_counter()


def seconds_per_step(marks: Marks) -> dict[str, float]:
    """Return the CPU mean and 10th percentile and the wall median and maximum of one turn, in seconds."""
    cpu = sorted(after[0] - before[0] for before, after in itertools.pairwise(marks))
    wall = [after[1] - before[1] for before, after in itertools.pairwise(marks)]
    return {
        "mean": sum(cpu) / len(cpu),
        "p10": cpu[len(cpu) // 10],
        "wall": statistics.median(wall),
        "slowest": max(wall),
    }


@contextlib.contextmanager
def _batches_by_way_of(around: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[None]:
    """Pass the training batches of this thread's Trainer through `around`."""
    from distributed.backends.ddp import DDPBackend

    original, owner = DDPBackend.shard, threading.current_thread()

    def shard(self: Any, data: Any, batch: Any, role: Any) -> Any:
        sharded = original(self, data, batch, role)
        if role.is_training and threading.current_thread() is owner:
            inner = sharded.epoch
            sharded.epoch = lambda epoch, skip=0: around(inner(epoch, skip))
        return sharded

    DDPBackend.shard = shard  # type: ignore[method-assign]
    try:
        yield
    finally:
        DDPBackend.shard = original  # type: ignore[method-assign]
