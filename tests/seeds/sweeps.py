"""The sweeps of 002, on a Ray of this machine that is started once. Prints one line of facts. Argument: a directory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from tests import ray_clusters
from tests.seeds.running import run

OUT = Path(sys.argv[1])
inputs = torch.randn(128, 6, generator=torch.Generator().manual_seed(3))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
train_loader, val_loader = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)


def create_model(hidden_size: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, hidden_size), torch.nn.ReLU(), torch.nn.Linear(hidden_size, 2))


def train_function(config: dict[str, Any]) -> None:
    Trainer(create_model(8), config, epochs=2).fit(train_loader, val_loader)


def main() -> None:
    os.chdir(OUT)
    ray_clusters.init(OUT / "ray", num_cpus=2)
    given = {"create_model": create_model, "train_loader": train_loader, "val_loader": val_loader}
    np.random.seed(0)  # Ray Tune draws from this generator; some rates of the sample's range learn nothing in one epoch
    with contextlib.redirect_stdout(io.StringIO()) as text:
        analysis = run("002/ray_tune.py", **given)["analysis"]
    rows = [trial.last_result["accuracy"] for trial in analysis.trials]
    space = {"lr": [1e-5, 0.05]}
    found = run("002/tuner.py", train_function=train_function, search_space=space)
    ray.shutdown()
    print(json.dumps({
        "accuracies": rows, "best": analysis.best_config, "said": text.getvalue().splitlines()[-1],
        "best_params": found["best_params"],
    }))  # fmt: skip


if __name__ == "__main__":
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    main()
