"""Measure how long a run stands still after one of its two workers was killed.

python benchmarks/restarts.py [--backends pytorch-ddp,fsdp,horovod,deepspeed,ray] [--kills 10]

In each run rank 1 gets SIGKILL again and again, each time after at least twenty steps since the last one. The time is that from the kill to
the end of the first step that rank 0 makes in a new process. torchrun restarts a script that loads the weights, the optimizer and the
number of steps itself; it comes twice, and the difference is noise. A run that makes no step within a minute counts as hung, and is
started anew. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import machine
from whole_runs import HERE, kill_tree, marked

BACKENDS = ("pytorch-ddp", "fsdp", "horovod", "deepspeed", "ray")
TORCHRUN = "torchrun, hand-written"
GOALS = {"pytorch-ddp": 1.5, "deepspeed": 3.0, "ray": 8.0}  # seconds, in the median
HUNG_S, STEPS = 60.0, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BACKENDS), help="(default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="of each (default: %(default)s)")
    asked = parser.parse_args()
    names = [TORCHRUN, *asked.backends.split(","), f"{TORCHRUN}, again"]
    found = {name: measure(command_of(name), asked.kills) for name in names}
    rows = [["", "at most", "median s", "range", "hung"]]
    for name, seconds in found.items():
        ended = [each for each in seconds if each < HUNG_S]
        span = f"{min(ended):.2f}-{max(ended):.2f}" if ended else ""
        middle = f"{statistics.median(ended):.2f}" if ended else ""
        limit = f"{GOALS[name]:g}" if name in GOALS else ""
        rows.append([name, limit, middle, span, f"{len(seconds) - len(ended)} of {len(seconds)}"])
    print(f"{machine.table(rows)}\n\n{asked.kills} kills of each\n{machine.describe()}")
    return 0 if all(statistics.median(found[name]) <= limit for name, limit in GOALS.items() if name in found) else 1


def command_of(name: str) -> list[str]:
    """Return the command of a contestant. `{directory}` in it stands for where it writes its steps."""
    if name.startswith(TORCHRUN):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "999"]  # fmt: skip
        return [*torchrun, str(HERE / "restarts_hand_written.py"), "{directory}"]
    train = [sys.executable, "-m", "distributed.cli", "train", "--script", str(HERE / "restarts_trainer.py"), "--backend", name]  # fmt: skip
    return [*train, "--device", "cpu", "--nproc-per-node", "2", "--max-restarts", "999", "--", "{directory}"]


def measure(command: Sequence[str], kills: int) -> list[float]:
    """Return the seconds without a step after each kill, HUNG_S if there was none."""
    found: list[float] = []
    while len(found) < kills:
        with Run(command) as run:
            while len(found) < kills:
                found.append(run.kill())
                if found[-1] == HUNG_S:
                    break
    return found


class Run:
    """A command that trains with two workers, until the end of the `with` block."""

    def __init__(self, command: Sequence[str]) -> None:
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._files, self._mark = Path(self._directory.name), uuid.uuid4().hex
        self._words = [word.replace("{directory}", self._directory.name) for word in command]
        with (self._files / "output").open("wb") as output:
            self._process = subprocess.Popen(
                self._words, cwd=self._files, env=marked(self._mark), stdout=output, stderr=subprocess.STDOUT
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        kill_tree(self._mark)  # workers that outlived the command
        self._directory.cleanup()

    def kill(self) -> float:
        """Kill rank 1 after both ranks have made enough steps. Return the seconds to the first step of a new process of rank 0."""
        if not self._until(lambda: min(len(self._steps(0)), len(self._steps(1))) >= STEPS):
            return HUNG_S
        (_, former, _), (_, victim, _) = self._steps(0)[-1], self._steps(1)[-1]
        time.sleep(random.random() * 0.2)
        os.kill(int(victim), signal.SIGKILL)
        began = time.time()
        if not self._until(lambda: self._steps(0)[-1][1] != former):
            return HUNG_S
        return float(self._steps(0)[0][0]) - began

    def _steps(self, rank: int) -> list[list[str]]:
        """Return [time, process, step] of each step that the newest process of a rank has made."""
        file = self._files / f"steps-{rank}"
        rows = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [row for row in rows if row[1] == rows[-1][1]]

    def _until(self, is_true: Callable[[], bool]) -> bool:
        """Wait until `is_true()`, and return whether it came true within HUNG_S. Raises SystemExit if the command has ended."""
        deadline = time.monotonic() + HUNG_S
        while not is_true():
            if self._process.poll() is not None:
                said = (self._files / "output").read_text()
                raise SystemExit(f"{' '.join(self._words)} ended:\n{said[-5000:]}")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


if __name__ == "__main__":
    sys.exit(main())
