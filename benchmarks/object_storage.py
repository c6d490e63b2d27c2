"""Measure what training pays for copying its checkpoints to object storage.

python benchmarks/object_storage.py [--rounds 3] [--megabytes-per-second 40]

One process trains with and without `checkpoint_dir=s3://...`, in turns. The server is moto's on loopback, behind a limit of its
speed, so that an upload lasts as long as on a network. A checkpoint has 48 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
_SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 1000), torch.randn(4096, 4000))
Trainer(
    torch.nn.Linear(1000, 4000), loss_fn=torch.nn.functional.mse_loss, batch_size=8, max_steps=160, epochs=1, checkpoint_every_n_steps=40,
    checkpoint_frequency=None, log_every_n_steps=8, keep_best=False,
).fit(data)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--megabytes-per-second", type=float, default=40.0, help="of the server (default: %(default)s)")
    asked = parser.parse_args()
    from tests.object_storage import s3_server

    results: dict[str, list[dict[str, float]]] = {"without": [], "s3://": [], "without, again": []}
    with s3_server() as server:
        server.bytes_per_s = asked.megabytes_per_second * 1e6
        for _ in range(asked.rounds):
            for name, found in results.items():
                server.calm()
                found.append(_run(server.env, ["--checkpoint-dir", "s3://bucket/mine"] if name == "s3://" else []))
    columns = ["seconds per save", "ms per step", "seconds per upload", "wait at the end, s"]
    rows = [
        [name, *(machine.spread([each[column] for each in found]) for column in columns)]
        for name, found in results.items()
    ]
    print(f"{machine.table([['', *columns], *rows])}\n\n{machine.describe('s3fs')}")
    return 0


def _run(env: dict[str, str], flags: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory, "train.py")
        script.write_text(_SCRIPT)
        command = [
            sys.executable,
            "-m",
            "distributed.cli",
            "train",
            "--script",
            str(script),
            "--backend",
            "single",
            "--run-dir",
            f"{directory}/run",
        ]
        subprocess.run(
            [*command, *flags], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **env, "PYTHONPATH": str(ROOT)}, cwd=directory
        )  # fmt: skip
        events = list(_lines(Path(directory, "run", "events.jsonl")))
        times = list(_lines(Path(directory, "run", "times.jsonl")))
    uploads = [event["seconds"] for event in events if event["event"] == "checkpoint_uploaded"]
    saved = [event["time"] for event in events if event["event"] == "checkpoint_saved"]
    return {
        "seconds per save": statistics.mean(8 * row["checkpoint_s"] for row in times if row["checkpoint_s"]),
        "ms per step": statistics.median(1e3 * (row["step_s"] - row["checkpoint_s"]) for row in times),
        "seconds per upload": statistics.mean(uploads) if uploads else 0.0,
        "wait at the end, s": events[-1]["time"] - saved[-1] if uploads else 0.0,
    }


def _lines(path: Path) -> Iterator[dict[str, float]]:
    return map(json.loads, path.read_text().splitlines())


if __name__ == "__main__":
    sys.exit(main())
