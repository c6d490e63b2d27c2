"""Progress reports of a script that is being timed: files that contain the time, in a directory of their own."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from pathlib import Path

LIMIT_S = 60


def reached(directory: str, what: str) -> None:
    """Write the time at which `what` was reached. The file appears complete or not at all."""
    path = Path(directory, what)
    path.with_suffix(".part").write_text(repr(time.time()))
    path.with_suffix(".part").rename(path)


def stepped(directory: str, rank: int, step: int) -> None:
    """Append the time, this process and the step that it has made to the file of its rank."""
    with open(Path(directory, f"steps-{rank}"), "a") as file:
        file.write(f"{time.time()!r} {os.getpid()} {step}\n")


def pause(directory: str) -> None:
    """Wait while the benchmark measures the memory of all processes."""
    reached(directory, "paused")
    deadline = time.monotonic() + LIMIT_S
    while not Path(directory, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class Stopwatch:
    """Time `steps` updates of one process after `warm_up` updates, then wait.

    The loop makes one more update, in which the other ranks wait. Only the figures of the main process are written.
    """

    def __init__(self, directory: str, warm_up: int, steps: int, is_main: bool) -> None:
        self._directory, self._warm_up, self._steps, self._is_main = directory, warm_up, steps, is_main
        self._marks: list[tuple[float, float]] = []
        self._count = 0

    @property
    def updates(self) -> int:
        """Number of updates that the loop makes in total."""
        return self._warm_up + self._steps + 1

    def lap(self) -> None:
        """Record one update. Call it after each update."""
        self._count += 1
        if self._count >= self._warm_up:
            self._marks.append((time.process_time(), time.perf_counter()))
        if self._is_main and self._count == 1:
            reached(self._directory, "first-step")
        if self._is_main and self._count == self._warm_up + self._steps:
            self._write()
            pause(self._directory)

    def _write(self) -> None:
        cpu, wall = ([mark[clock] for mark in self._marks] for clock in (0, 1))
        lasted = [later - earlier for earlier, later in itertools.pairwise(wall)]
        measured = {"cpu": (cpu[-1] - cpu[0]) / self._steps, "wall": statistics.median(lasted)}
        Path(self._directory, "measured.json").write_text(json.dumps(measured))
