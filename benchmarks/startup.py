"""From the command to the first completed step, and the memory of all processes: torchrun with a hand-written DDP loop
against `train` with our Trainer. Same model and data, two processes, in turns.

python benchmarks/startup.py [--rounds 5]

Memory is the proportional set size (PSS) of the whole process tree at step 50: shared pages count once.
Exit code 1 when a goal is missed by more than "torchrun again" shows as noise.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import machine
from goals import Goal, verdicts

HERE = Path(__file__).resolve().parent
LIMIT_S = 120
MARK = "BENCHMARK_TREE"
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
            results[name].append(run_once(arguments))
    goals = goals_of(results)
    print(f"{machine.table(summary(results))}\n\n{verdicts(goals)}\n\n{rounds} rounds\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


def goals_of(results: dict[str, list[dict[str, float]]]) -> list[Goal]:
    """What is to be reached."""

    def goal(name: str, limit: float, key: str) -> Goal:
        return Goal(name, limit, ratios(results[OURS], results[BASE], key), ratios(results[AGAIN], results[BASE], key))

    return [goal("first step x", 0.65, "first"), goal("PSS x", 0.75, "pss")]


def run_once(arguments: list[str]) -> dict[str, float]:
    """One run: seconds to the first step and to the end, and the tree's PSS in MB."""
    with tempfile.TemporaryDirectory() as directory:
        mark = uuid.uuid4().hex
        command = [sys.executable, *(argument.replace("{directory}", directory) for argument in arguments)]
        path = os.pathsep.join([str(HERE.parent), str(HERE)])
        env = {**os.environ, MARK: mark, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        begin = time.time()
        with subprocess.Popen(
            command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                pss = _memory_when_paused(process, Path(directory), mark)
                output, _ = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        whole = time.time() - begin
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{output}")
        first = float(Path(directory, "first-step").read_text()) - begin
        return {"first": first, "whole": whole, "pss": pss}


def _memory_when_paused(process: subprocess.Popen[str], directory: Path, mark: str) -> float:
    deadline = time.monotonic() + LIMIT_S
    while not (directory / "paused").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output = process.stdout.read() if process.stdout else ""
            raise SystemExit(f"the run did not come to step 50:\n{output}")
        time.sleep(0.01)
    pss = tree_pss(mark)
    (directory / "go").touch()
    return pss


def tree_pss(mark: str) -> float:
    """MB of all processes that carry `mark` in their environment."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            if found := re.search(r"^Pss:\s+(\d+) kB", (entry / "smaps_rollup").read_text(), re.M):
                total += int(found.group(1))
        except OSError:  # ended meanwhile, or not ours
            continue
    return total / 1000


def summary(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Table rows; ratios are taken within a round."""
    rows = [["", "first step s", "first step x", "whole run s", "whole run x", "PSS MB", "PSS x"]]
    for name, runs in results.items():
        row = [name]
        for key in ("first", "whole", "pss"):
            middle = statistics.median(run[key] for run in runs)
            row += [f"{middle:.0f}" if key == "pss" else f"{middle:.2f}"]
            row += [machine.spread(ratios(runs, results[BASE], key))]
        rows.append(row)
    return rows


def ratios(runs: list[dict[str, float]], base: list[dict[str, float]], key: str) -> list[float]:
    """One of each round."""
    return [run[key] / raw[key] for run, raw in zip(runs, base, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
