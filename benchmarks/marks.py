"""How a script that is being timed tells where it is: files with the time in them, in a directory of its own."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path

LIMIT_S = 60


def reached(directory: str, what: str) -> None:
    """Note the time of `what`, so that it appears complete or not at all."""
    path = Path(directory, what)
    path.with_suffix(".part").write_text(repr(time.time()))
    path.with_suffix(".part").rename(path)


def pause(directory: str) -> None:
    """Hold still while the memory of all processes is counted."""
    reached(directory, "paused")
    deadline = time.monotonic() + LIMIT_S
    while not Path(directory, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class Stopwatch:
    """Times the updates of one process, `steps` of them after `warm_up`, and holds still after them.

    The loop makes one update more, in which the other ranks wait. Only the main process' figures are written.
    """

    def __init__(self, directory: str, warm_up: int, steps: int, is_main: bool) -> None:
        self._directory, self._warm_up, self._steps, self._is_main = directory, warm_up, steps, is_main
        self._marks: list[tuple[float, float]] = []
        self._count = 0

    @property
    def updates(self) -> int:
        """How many the loop makes in all."""
        return self._warm_up + self._steps + 1

    def lap(self) -> None:
        """After each update."""
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
