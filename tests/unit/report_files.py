"""Directories as runs and sweeps leave them, written in milliseconds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import yaml

BEGAN = 1_700_000_000.0  # seconds since 1970


def write_lines(path: Path, rows: list[dict[str, Any]], rest: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + rest)


def write_run(
    path: Path, *, steps: int = 1000, every: int = 10, world_size: int = 2, rate: float = 900.0, spikes: dict[int, float] | None = None,
    status: str = "finished", seed: int = 0, backend: str = "pytorch-ddp", settings: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None, slow_rank: float = 1.0, num_nodes: int = 1,
) -> Path:  # fmt: skip
    """A run of `steps` updates, one log line per `every`. `spikes`: step -> the loss there."""
    noise = random.Random(seed)
    path.mkdir(parents=True)
    spikes = spikes or {}
    train, times, val = [], [], []
    per_epoch = max(steps // 5, 1)
    for step in range(every, steps + 1, every):
        position = {"step": step, "epoch": (step - 1) // per_epoch, "time": BEGAN + 1 + step * 0.02}
        loss = spikes.get(step, (2.3 + 0.2 * seed) * math.exp(-3 * step / steps) + 0.05 + 0.02 * noise.random())
        more = {
            "accuracy": 1 - step / steps / 4,
            "learning_rate": 1e-3 * (1 - step / steps),
            "grad_norm": 1 + noise.random(),
        }
        train.append(
            {
                **position,
                "split": "train",
                "loss": loss,
                "samples_per_second": rate * (0.9 + 0.2 * noise.random()),
                **more,
            }
        )
        compute = 0.012 + 0.002 * noise.random()
        split = {"data_s": 0.002, "compute_s": compute, "communication_s": 0.004, "checkpoint_s": 0.001}
        ranks = {f"rank_{rank}_s": compute * (slow_rank if rank == 1 else 1.0) for rank in range(world_size)}
        times.append({**position, "step_s": sum(split.values()), **split, **ranks})
        if step % per_epoch < every:
            val.append(
                {
                    **position,
                    "time": position["time"] + 0.01,
                    "split": "val",
                    "loss": 2.4 * math.exp(-3 * step / steps) + 0.2,
                    "accuracy": 0.95 - math.exp(-3 * step / steps),
                }
            )
    write_lines(path / "metrics.jsonl", sorted(train + val, key=lambda row: row["time"]))
    write_lines(path / "times.jsonl", times)
    saved = [
        {"time": BEGAN + 1 + step * 0.02, "event": "checkpoint_saved", "step": step, "checkpoint": f"step-{step:08d}"}
        for step in range(per_epoch, steps + 1, per_epoch)
    ]
    first = {
        "time": BEGAN,
        "event": "started",
        "backend": backend,
        "world_size": world_size,
        "step": 0,
        "restart_count": 0,
    }
    write_lines(path / "events.jsonl", sorted([first, *saved, *(events or [])], key=lambda event: event["time"]))
    result = {
        "status": status, "backend": backend, "world_size": world_size, "num_nodes": num_nodes,
        "steps": steps, "epochs": 5, "total_time": steps * 0.02,
        "final_metrics": {}, "best_metrics": {"val_loss": 0.16, "val_accuracy": 0.93}, "samples_per_second": rate, "checkpoint": None,
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(result))
    values = {
        "epochs": 5,
        "batch_size": 16,
        "learning_rate": 0.001,
        "global_batch_size": 16 * world_size,
        **(settings or {}),
    }
    config = {
        "script": "train.py",
        "script_args": [],
        **values,
        "sources": dict.fromkeys(["epochs", *(settings or {})], "flag"),
    }
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return path


def write_sweep(path: Path, *, trials: int = 20, with_runs: int = 0) -> Path:
    """A sweep whose metric depends on the learning rate, a little on the optimizer and not on dropout."""
    noise = random.Random(1)
    path.mkdir(parents=True)
    rows = []
    for number in range(trials):
        config = {
            "learning_rate": 10 ** noise.uniform(-4, -1), "batch_size": noise.choice([16, 32, 64]),
            "optimizer": noise.choice(["sgd", "adam"]), "dropout": round(noise.random() / 2, 3), "layers": 3,
        }  # fmt: skip
        loss = (
            (math.log10(config["learning_rate"]) + 2.5) ** 2
            + 0.1 * (config["optimizer"] == "sgd")
            + 0.01 * noise.random()
        )
        trial = {
            "id": f"trial-{number:02d}",
            "config": config,
            "metrics": {"val_loss": loss},
            "status": "finished",
            "epochs": 5,
        }
        if number < with_runs:
            trial["run_dir"] = write_run(path / f"run-{number}", seed=number, steps=200).name
        rows.append(trial)
    rows.append(
        {
            "id": "crashed",
            "config": {**rows[0]["config"]},
            "metrics": {},
            "status": "failed",
            "epochs": 0,
            "run_dir": None,
        }
    )
    content = {"metric": "val_loss", "mode": "min", "trials": rows, "best": rows[0]}
    (path / "sweep.json").write_text(json.dumps(content))
    return path
