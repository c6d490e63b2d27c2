"""Measure saving and resuming against the disk, the memory and torch's own checkpoints, in one run.

python benchmarks/checkpoint.py [--megabytes 1024] [--width 1024] [--processes 1|2] [--backend single|pytorch-ddp|fsdp|deepspeed]
                                [--device cpu|cuda] [--rounds 7]

All contestants save or load the same state, the weights and the two moments of AdamW, in the same processes, in turns in a
random order. Ratios are taken within a round: saves over a raw write and fsync of the same bytes, loads over reading these bytes from the page cache,
and the time for which an asynchronous save blocks over a copy of the state into kept memory. The table shows median and quartiles.
"again" is a second contestant that does the same as the first: its difference is noise. "extra MB" is the memory that a save takes on
top of what the process had, on its worst rank. With a GPU the copy goes into pinned memory, and what is read is copied to the GPU.
Exits with 1 if a goal is missed by more than the noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine
from checkpoint_worker import AGAIN, BASES, BLOCKED, EXTRA_LIMIT_MB, OURS, WRITE
from goals import Goal, verdicts
from overhead import environment, free_port

HERE = Path(__file__).resolve().parent
LIMIT_S = 3600
LIMITS = {WRITE: 1.1, "page-cache read": 1.5, "memcpy": 1.2}
Runs = list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1024, help="size of the state (default: %(default)s)")
    parser.add_argument(
        "--width", type=int, help="of the layers, whose weights are [width, width] (default: 1024, below 64 MB 128)"
    )
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="(default: %(default)s)")
    parser.add_argument("--backend", choices=("single", "pytorch-ddp", "fsdp", "deepspeed"), default="single")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the state is (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: %(default)s)")
    parser.add_argument("--directory", help="where to write (default: the directory for temporary files)")
    args = parser.parse_args()
    if args.backend == "single" and args.processes != 1:
        parser.error("single has one process: name another --backend, or --processes 1")
    result = measure(args)
    goals = goals_of(result["runs"])
    print(f"{result['about']}\n\n{machine.table(summary(result['runs']))}\n\n{verdicts(goals)}\n\n{machine.describe()}")
    return 0 if all(goal.is_met for goal in goals) else 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks until they end and return the measurements of rank 0."""
    with tempfile.TemporaryDirectory(dir=args.directory) as directory, contextlib.ExitStack() as stack:
        out, port = Path(directory, "result.json"), free_port()
        width = args.width or (1024 if args.megabytes >= 64 else 128)
        asked = [args.backend, args.device, str(args.megabytes), str(width), str(args.rounds)]
        command = [sys.executable, str(HERE / "checkpoint_worker.py"), *asked, str(out)]
        ranks = []
        for rank in range(args.processes):
            env = {
                **environment(rank, port),
                "WORLD_SIZE": str(args.processes),
                "LOCAL_WORLD_SIZE": str(args.processes),
            }
            if args.backend == "single":
                env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
            ranks.append(
                stack.enter_context(subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.DEVNULL))
            )
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def goals_of(runs: dict[str, Runs]) -> list[Goal]:
    """Return the goals of our own contestants."""
    goals = []
    for name in OURS & runs.keys():
        base = BASES[name]
        noise = ratios(runs[AGAIN[base]], runs[base])
        goals.append(Goal(f"{name}: x {base}", LIMITS[base], ratios(runs[name], runs[base]), noise))
    extra = [run["extra"] for name in OURS & runs.keys() if BASES[name] == WRITE for run in runs[name]]
    return [
        *sorted(goals, key=lambda goal: goal.name),
        Goal("extra MB of a save", EXTRA_LIMIT_MB, extra, [0.0], par=0.0),
    ]


def summary(runs: dict[str, Runs]) -> list[list[str]]:
    """Return table rows, one for each contestant."""
    rows = [["", "seconds", "x", "of", "extra MB"]]
    for name, mine in runs.items():
        base = BASES[name]
        seconds = statistics.median(run["seconds"] for run in mine)
        extra = statistics.median(run["extra"] for run in mine)
        is_save = base == WRITE or name in BLOCKED
        rows.append(
            [name, f"{seconds:.3f}", quartiles(ratios(mine, runs[base])), base, f"{extra:.0f}" if is_save else ""]
        )
    return rows


def ratios(runs: Runs, base: Runs) -> list[float]:
    """Return the ratio of each round."""
    return [run["seconds"] / other["seconds"] for run, other in zip(runs, base, strict=True)]


def quartiles(values: list[float]) -> str:
    """Return the values as text: median (lower quartile-upper quartile)."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
