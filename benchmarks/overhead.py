"""Measure the cost of a step over a hand-written DDP loop. Both train the same model in the same two processes, taking
turns.

python benchmarks/overhead.py [--workload mlp|gpt] [--quick] [--mlflow-server gone|mute]

On a shared machine, trust the main-thread CPU time per step: its 10th percentile within a turn, and its mean. The mean
includes the log lines and, for MLflow, the share of its threads. The table also shows wall time. Ratios are taken
within a round (one turn of each contestant); the table shows their median and range over the rounds. "hand-written
again" is a second hand-written loop: its difference is noise. Exits with 1 if a goal is missed by more than that, or if
weights differ.

With --mlflow-server, MLflow logs to a server that does not exist, or to one that accepts requests and never answers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
from goals import Goal, verdicts

HERE = Path(__file__).resolve().parent
LIMIT_S = 900
LOG_EVERY = 50  # steps, by default
IMAGE_EVERY = 100  # steps
BASE, AGAIN, OURS, UNWATCHED, FULL, AVERAGED, IMAGED, TRACKED, OWN = (
    "hand-written", "hand-written again", "Trainer, defaults", "Trainer, not watched", "Trainer, callbacks, metrics, log",
    "Trainer, moving average", "Trainer, images", "Trainer, TensorBoard, MLflow", "Session, own loop",
)  # fmt: skip
Turns = list[dict[str, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("mlp", "gpt"), help="only this one")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs, not how fast (no goals)")
    parser.add_argument("--mlflow-server", choices=("gone", "mute"), help="log to a server that does not answer")
    args = parser.parse_args()
    is_reached = True
    for name in [args.workload] if args.workload else ["mlp", "gpt"]:
        with mlflow_store(args.mlflow_server) as store:
            result = measure(name, args.quick, store)
        print(f"{name}: {result['about']}\n\n{machine.table(summary(result))}\n", flush=True)
        is_reached &= len({found for each, found in result["digests"].items() if each != AVERAGED}) == 1
        if not args.quick:
            has_store = args.mlflow_server is None
            goals = goals_of(name, result, has_store)
            print(f"{verdicts(goals)}\n", flush=True)
            is_reached &= all(goal.is_met for goal in goals)
    print(machine.describe())
    return 0 if is_reached else 1


@contextlib.contextmanager
def mlflow_store(server: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables of the store to log to."""
    if server is None:
        yield {}
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:  # nothing ever accepts a connection
        port = listening.getsockname()[1]
        if server == "gone":
            listening.close()
        yield {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{port}"}


def goals_of(name: str, result: dict[str, Any], has_store: bool) -> list[Goal]:
    """Return the goals of one workload.

    Trackers write a line in each turn, but are judged at one line in `LOG_EVERY` steps, and images at one in `IMAGE_EVERY`.
    While MLflow's server does not answer, a step may take a tenth more.
    """
    turns, turn_steps = result["turns"], result["turn_steps"]
    again = ratios(turns[AGAIN], turns[BASE], "mean")
    step = Goal("a step's CPU x", 0.85 if name == "mlp" else 1.0, ratios(turns[OURS], turns[BASE], "mean"), again)
    watching, noise = (ratios(turns[each], turns[other], "p10") for each, other in ((OURS, UNWATCHED), (AGAIN, BASE)))
    watched = [Goal("reports to the launcher: CPU p10 x", 1.01, watching, noise), reports_alone(result)]
    if name == "gpt" and not has_store:
        figures = {"CPU x": "mean", "a turn's slowest step x": "slowest"}
        return [step] + [
            Goal(
                f"MLflow without a server: {what}",
                1.1,
                ratios(turns[TRACKED], turns[OURS], key),
                ratios(turns[AGAIN], turns[BASE], key),
            )
            for what, key in figures.items()
        ]
    if name == "gpt":
        tracked, noise = (
            spread_over(ratios(turns[each], turns[other], "mean"), turn_steps / LOG_EVERY)
            for each, other in ((TRACKED, OURS), (AGAIN, BASE))
        )
        imaged, image_noise = (
            spread_over(ratios(turns[each], turns[other], "mean"), turn_steps / IMAGE_EVERY)
            for each, other in ((IMAGED, OURS), (AGAIN, BASE))
        )
        image = Goal(f"an image in {IMAGE_EVERY} steps: CPU x", 1.01, imaged, image_noise)
        average = Goal(
            "moving average of the weights: CPU x", 1.03, ratios(turns[AVERAGED], turns[OURS], "mean"), again
        )
        line = Goal(f"TensorBoard, MLflow, a line in {LOG_EVERY} steps: CPU x", 1.01, tracked, noise)
        return [step, *watched, average, image, line]
    on_top = [microseconds - 1e6 * result["metric_s"] for microseconds in over(turns[FULL], turns[OURS])]
    noise = over(turns[AGAIN], turns[BASE])
    own = Goal("own loop: a step's CPU x", 1.0, ratios(turns[OWN], turns[BASE], "mean"), again)
    return [
        step,
        *watched,
        own,
        Goal("callbacks, metrics, log: CPU us on top of the metric's own", 10, on_top, noise, par=0.0),
    ]


def reports_alone(result: dict[str, Any]) -> Goal:
    """Return the goal of the reports to the launcher, timed alone, as a share of a step."""
    step_s = statistics.median(turn["mean"] for turn in result["turns"][OURS])
    shares = [seconds / step_s for seconds in result["reports_s"]]
    middle = statistics.median(shares)
    return Goal(
        "reports to the launcher, alone: share of a step", 0.01, shares, [share - middle for share in shares], par=0.0
    )


def measure(name: str, quick: bool, store: dict[str, str]) -> dict[str, Any]:
    """Run both ranks until they end and return the measurements of rank 0."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        out, port = Path(directory, "result.json"), free_port()
        command = [sys.executable, str(HERE / "overhead_worker.py"), name, str(out), str(int(quick))]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    command, cwd=directory, env={**environment(rank, port), **store}, stdout=subprocess.DEVNULL
                )
            )
            for rank in range(2)
        ]
        try:
            codes = [rank.wait(LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{name}: the two ranks ended with {codes}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def free_port() -> int:
    """Return a port that is free, of those that Linux gives to no connection by itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def environment(rank: int, port: int) -> dict[str, str]:
    """Return the environment that torchrun would give rank `rank` of two, with one thread each."""
    given = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": HERE.parent,
    }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in given.items()}}


def summary(result: dict[str, Any]) -> list[list[str]]:
    """Return table rows: each contestant compared with the hand-written loop of the same round."""
    rows = [["", "CPU us", "CPU x", "CPU us over", "CPU p10 x", "wall p50 x", "weights"]]
    base, reference = result["turns"][BASE], result["digests"][BASE]
    for name, turns in result["turns"].items():
        rows.append(
            [
                name,
                f"{statistics.median(turn['mean'] for turn in turns) * 1e6:.0f}",
                machine.spread(ratios(turns, base, "mean")),
                f"{statistics.median(over(turns, base)):+.0f}",
                machine.spread(ratios(turns, base, "p10")),
                machine.spread(ratios(turns, base, "wall")),
                "averaged" if name == AVERAGED else "identical" if result["digests"][name] == reference else "DIFFER",
            ]
        )
    return rows


def ratios(turns: Turns, base: Turns, key: str) -> list[float]:
    """Return the ratio of each round."""
    return [turn[key] / raw[key] for turn, raw in zip(turns, base, strict=True)]


def spread_over(found: list[float], share: float) -> list[float]:
    """Return the ratios of a cost that each turn has once, if only the `share` of the turns had it."""
    return [1 + (each - 1) * share for each in found]


def over(turns: Turns, base: Turns) -> list[float]:
    """Return the additional CPU microseconds per step over `base`, one figure per round."""
    return [(turn["mean"] - raw["mean"]) * 1e6 for turn, raw in zip(turns, base, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
