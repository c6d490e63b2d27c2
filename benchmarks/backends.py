"""Measure the cost of each backend over the bare loop of its engine, in time and memory.

python benchmarks/backends.py [--backends fsdp,ray] [--workload mlp|gpt] [--rounds 5] [--quick]

Whole runs take turns. Measured are the time from the command to the first step, a steady step, and memory.

CPU is the time of all threads of the main process of the training, per update. Wall is the median over the updates of a
run. Memory is what all processes have at the end (shared pages count once), plus how far each had been above that.
Ratios are taken within a round; the table shows their median and range over the rounds. "bare again" is a second run of
the bare loop: its difference is noise. Exits with 1 if a goal is missed by more than that. A backend that is not
registered, or whose library is missing, is left out with a line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
from pathlib import Path

import machine
from distributed.config.registry import REGISTRY, missing_libraries
from goals import Goal, verdicts
from whole_runs import HERE, ratios, run_once

BARE, OURS, AGAIN = "bare", "Trainer", "bare again"
Runs = dict[str, list[dict[str, float]]]
# Untimed updates before the clock starts, and timed updates.
STEPS = {"mlp": (50, 300), "gpt": (3, 20)}
QUICK = {"mlp": (3, 10), "gpt": (1, 2)}
_PYTHON = sys.executable
_TORCHRUN = [
    _PYTHON,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    str(HERE / "bare_torch.py"),
]
# The command with which each engine starts two processes.
BARE_COMMANDS = {
    "single": [_PYTHON, str(HERE / "bare_torch.py"), "single"],
    "pytorch-ddp": [*_TORCHRUN, "pytorch-ddp"],
    "fsdp": [*_TORCHRUN, "fsdp"],
    "deepspeed": [*_TORCHRUN, "deepspeed"],
    "horovod": [
        _PYTHON, str(Path(_PYTHON).with_name("horovodrun")), "--gloo", "-np", "2", _PYTHON, str(HERE / "bare_torch.py"), "horovod",
    ],
    "ray": [_PYTHON, str(HERE / "bare_torch.py"), "ray"],
    "tensorflow": [_PYTHON, str(HERE / "bare_tensorflow.py")],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default=",".join(BARE_COMMANDS), help="with commas (default: %(default)s)")
    parser.add_argument("--workload", choices=tuple(STEPS), help="only this one")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs, not how fast (no goals)")
    args = parser.parse_args()
    is_reached, names = True, [name for name in args.backends.split(",") if is_here(name)]
    for workload in [args.workload] if args.workload else list(STEPS):
        warm_up, steps = (QUICK if args.quick else STEPS)[workload]
        for name in names:
            runs = measure(name, workload, warm_up, steps, args.rounds)
            print(f"{name}, {workload}, {steps} updates a run, {args.rounds} rounds\n", flush=True)
            print(f"{machine.table(summary(runs))}\n", flush=True)
            goals = [] if args.quick else goals_of(name, workload, runs)
            if goals:
                print(f"{verdicts(goals)}\n", flush=True)
            is_reached &= all(goal.is_met for goal in goals)
    print(machine.describe(*libraries(names)))
    return 0 if is_reached else 1


def is_here(name: str) -> bool:
    """Return True if the backend can run. Print a line if it cannot."""
    if name not in BARE_COMMANDS:
        raise SystemExit(f"--backends {name}: there is no bare loop for it, choose of {', '.join(BARE_COMMANDS)}")
    why = "it is not in this version" if name not in REGISTRY else ""
    if not why and (missing := missing_libraries(REGISTRY[name])):
        why = f"{', '.join(missing)} is not installed: {REGISTRY[name].install}"
    if why:
        print(f"{name} is left out: {why}\n", flush=True)
    return not why


def libraries(names: list[str]) -> list[str]:
    """Return the distributions whose versions are printed with the figures."""
    found = importlib.metadata.packages_distributions()
    wanted = {library for name in names for library in REGISTRY[name].requires} - {"torch"}
    return sorted({found[library][0] for library in wanted})


def measure(name: str, workload: str, warm_up: int, steps: int, rounds: int) -> Runs:
    """Run all contestants in turns. Their order rotates from round to round."""
    tail = [workload, "{directory}", str(warm_up), str(steps)]
    script = "backends_trainer_keras.py" if name == "tensorflow" else "backends_trainer.py"
    processes = "1" if REGISTRY[name].single_process else "2"
    ours = [
        _PYTHON, "-m", "distributed.cli", "train", "--script", str(HERE / script), "--backend", name,
        "--nproc-per-node", processes, "--run-dir", "{directory}/run", "--", *tail,
    ]  # fmt: skip
    bare = [*BARE_COMMANDS[name], *tail]
    commands = {BARE: bare, OURS: ours, AGAIN: bare}
    runs: Runs = {who: [] for who in commands}
    for number in range(rounds):
        order = list(commands)
        for who in order[number % 3 :] + order[: number % 3]:
            runs[who].append(run_once(commands[who]))
    return runs


def goals_of(name: str, workload: str, runs: Runs) -> list[Goal]:
    """Return the goals of one backend and workload."""

    def goal(text: str, limit: float, key: str) -> Goal:
        return Goal(text, limit, ratios(runs[OURS], runs[BARE], key), ratios(runs[AGAIN], runs[BARE], key))

    goals = [goal("a step's CPU x", 1.02, "cpu")] if workload == "gpt" else []
    return [*goals, goal("first step x", 1.0, "first")] if name == "ray" else goals


def summary(runs: Runs) -> list[list[str]]:
    """Return table rows: each contestant compared with the bare loop of the same round."""
    rows = [["", "first step s", "x", "CPU us", "x", "wall us", "x", "peak MB", "x"]]
    for who, each in runs.items():
        row = [who]
        for key, scale, form in (("first", 1, ".2f"), ("cpu", 1e6, ".0f"), ("wall", 1e6, ".0f"), ("peak", 1, ".0f")):
            row.append(format(statistics.median(run[key] for run in each) * scale, form))
            row.append(machine.spread(ratios(each, runs[BARE], key)))
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
