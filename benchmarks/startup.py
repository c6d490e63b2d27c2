"""Measure the time from the command to the first completed step, and the memory of all processes.

python benchmarks/startup.py [--rounds 5]

torchrun with a hand-written DDP loop is compared with `train` with our Trainer: same model and data, two processes, in
turns.

Memory is the proportional set size (PSS) of the whole process tree at step 50: shared pages count once. Exits with 1 if
a goal is missed by more than "torchrun again" shows as noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import machine
from goals import Goal, verdicts
from whole_runs import HERE, ratios, run_once

BASE, OURS, AGAIN = "torchrun, hand-written", "train, Trainer", "torchrun again"
_TORCHRUN = [
    "-m", "torch.distributed.run", "--nproc-per-node", "2", str(HERE / "startup_hand_written.py"), "{directory}",
]  # fmt: skip
_TRAIN = [
    "-m", "distributed.cli", "train", "--script", str(HERE / "startup_trainer.py"), "--nproc-per-node", "2",
    "--run-dir", "{directory}/run", "--", "{directory}",
]  # fmt: skip
CONTESTANTS = {BASE: _TORCHRUN, OURS: _TRAIN, AGAIN: _TORCHRUN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    rounds = parser.parse_args().rounds
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name, arguments in CONTESTANTS.items():
            results[name].append(run_once([sys.executable, *arguments]))
    goals = goals_of(results)
    print(f"{machine.table(summary(results))}\n\n{verdicts(goals)}\n\n{rounds} rounds\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


def goals_of(results: dict[str, list[dict[str, float]]]) -> list[Goal]:
    """Return the goals."""

    def goal(name: str, limit: float, key: str) -> Goal:
        return Goal(name, limit, ratios(results[OURS], results[BASE], key), ratios(results[AGAIN], results[BASE], key))

    return [goal("first step x", 0.65, "first"), goal("PSS x", 0.75, "pss")]


def summary(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return table rows. Ratios are taken within a round."""
    rows = [["", "first step s", "first step x", "whole run s", "whole run x", "PSS MB", "PSS x"]]
    for name, runs in results.items():
        row = [name]
        for key in ("first", "whole", "pss"):
            middle = statistics.median(run[key] for run in runs)
            row += [f"{middle:.0f}" if key == "pss" else f"{middle:.2f}"]
            row += [machine.spread(ratios(runs, results[BASE], key))]
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
