"""Compare twenty trials of examples/train.py in a shell loop with `tune` on the same values, and with ASHA on them.

python benchmarks/sweep.py [--trials 20] [--epochs 12] [--rounds 1]

The loop runs one process per core and starts `train` anew for each trial, with one thread. Exits with 1 if a goal is
missed: `tune` takes at most 1.5 times the loop's time and ends in the loop's losses bit for bit, and ASHA finds the
same best trial with at most half of the epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
from distributed.tuning.proposals import make_proposals
from distributed.tuning.space import make_space

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train.py"
SPACE = {"learning_rate": {"loguniform": ["1e-4", "1e-1"]}, "batch_size": [32, 64, 128]}
SEED = 1
CLI = [sys.executable, "-m", "distributed.cli"]
AT_MOST, EPOCHS_AT_MOST = 1.5, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="trials (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=12, help="epochs of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each way (default: %(default)s)")
    asked = parser.parse_args()
    rounds = [measure(asked.trials, asked.epochs) for _ in range(asked.rounds)]
    print(f"{machine.table(summary(rounds))}\n\n{asked.trials} trials of {asked.epochs} epochs, {asked.rounds} rounds")
    print(machine.describe("ray"))
    return 0 if is_good(rounds) else 1


def measure(trials: int, epochs: int) -> dict[str, dict[str, Any]]:
    """Run one round of all three ways. Return name -> seconds, epochs, the best trial and the losses."""
    with tempfile.TemporaryDirectory(prefix="sweep-") as name:
        directory = Path(name)
        (directory / "space.yaml").write_text(json.dumps(SPACE))
        return {
            "shell loop": shell_loop(directory, trials, epochs),
            "tune": tune(directory, "tune", trials, epochs),
            "tune, asha": tune(directory, "asha", trials, epochs, "--scheduler", "asha"),
        }


def shell_loop(directory: Path, trials: int, epochs: int) -> dict[str, Any]:
    """Run the trials with `xargs`, which keeps every core busy with one `train`."""
    proposals = make_proposals("random", make_space(SPACE), SEED)
    lines = []
    for number in range(trials):
        values = proposals.ask()
        words = [*common(epochs), "--run-dir", str(directory / "loop" / str(number))]
        words += ["--learning-rate", repr(values["learning_rate"]), "--batch-size", str(values["batch_size"])]
        lines.append(" ".join([*CLI, "train", *words]))
    began = time.monotonic()
    subprocess.run(
        ["xargs", "-P", str(len(os.sched_getaffinity(0))), "-I{}", "sh", "-c", "{} >/dev/null"],
        input="\n".join(lines), text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seconds = time.monotonic() - began
    runs = [directory / "loop" / str(number) for number in range(trials)]
    losses = [best_loss(run) for run in runs]
    return {
        "seconds": seconds, "epochs": trials * epochs, "best": losses.index(min(losses)), "losses": losses,
        "curves": [curve(run) for run in runs],
    }  # fmt: skip


def tune(directory: Path, name: str, trials: int, epochs: int, *flags: str) -> dict[str, Any]:
    """Run the trials with `tune`, which proposes the same values."""
    words = [*common(epochs), "--search-space", str(directory / "space.yaml"), "--num-samples", str(trials)]
    began = time.monotonic()
    subprocess.run(
        [*CLI, "tune", *words, "--run-dir", str(directory / name), *flags], check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.monotonic() - began
    content = json.loads((directory / name / "sweep.json").read_text())
    return {
        "seconds": seconds, "epochs": sum(trial["epochs"] for trial in content["trials"]),
        "best": int(content["best"]["id"]), "losses": [trial["metrics"]["val_loss"] for trial in content["trials"]],
        "curves": [curve(directory / name / trial["run_dir"]) for trial in content["trials"]],
    }  # fmt: skip


def common(epochs: int) -> list[str]:
    """Return the arguments that all trials share."""
    return ["--script", str(SCRIPT), "--epochs", str(epochs), "--seed", str(SEED)]


def best_loss(run: Path) -> float:
    """Return the smallest validation loss of a run."""
    loss: float = json.loads((run / "result.json").read_text())["best_metrics"]["val_loss"]
    return loss


def curve(run: Path) -> list[float]:
    """Return the validation loss of each epoch."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["split"] == "val"]


def same(found: dict[str, Any], loop: dict[str, Any]) -> str:
    """Return whether all epochs of all trials have the loop's losses, as a cell of the table."""
    if found["curves"] == loop["curves"]:
        return "all"
    pairs = zip(found["curves"], loop["curves"], strict=True)
    return "as far as they ran" if all(one == other[: len(one)] for one, other in pairs) else "differ"


def summary(rounds: list[dict[str, dict[str, Any]]]) -> list[list[str]]:
    """Return table rows. Ratios are taken within a round."""
    rows = [["", "seconds", "x the loop", "epochs", "best trial", "the loop's losses"]]
    for name in rounds[0]:
        ratios = [each[name]["seconds"] / each["shell loop"]["seconds"] for each in rounds]
        found = rounds[-1][name]
        seconds = statistics.median(each[name]["seconds"] for each in rounds)
        rows.append(
            [
                name,
                f"{seconds:.1f}",
                machine.spread(ratios),
                str(found["epochs"]),
                str(found["best"]),
                same(found, rounds[-1]["shell loop"]),
            ]
        )
    return rows


def is_good(rounds: list[dict[str, dict[str, Any]]]) -> bool:
    """Return True if every goal is met."""
    ratio = statistics.median(each["tune"]["seconds"] / each["shell loop"]["seconds"] for each in rounds)
    return ratio <= AT_MOST and all(
        each["tune"]["losses"] == each["shell loop"]["losses"]
        and each["tune, asha"]["best"] == each["shell loop"]["best"]
        and each["tune, asha"]["epochs"] <= EPOCHS_AT_MOST * each["shell loop"]["epochs"]
        for each in rounds
    )


if __name__ == "__main__":
    sys.exit(main())
