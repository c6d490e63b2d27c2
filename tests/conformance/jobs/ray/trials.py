"""Seed 002's sweep with Ray Tune, with a model and loaders filled in: trials that train in themselves, trials whose
workers take the trial's placement group, trials that Tune stops, and one whose group is too small. Prints one JSON line.

trials.py OUT NAME ...   NAME: a key of KINDS
"""

import json
import os
import sys
import time
from pathlib import Path

import ray
import torch
from ray import tune
from torch.utils.data import DataLoader, TensorDataset

from distributed import RayTrainer
from tests import ray_clusters

OUT = Path(sys.argv[1])
GROUP = tune.PlacementGroupFactory
TOLD = {"ray.report_to_tune": True}
ENDLESS = {**TOLD, "epochs": 100000}  # Tune stops the trial after three epochs
KINDS = {  # resources of a trial, and more of its config. The cluster has what one trial asks for, and no more.
    "alone": ({"cpu": 3}, {}),
    "one bundle": ({"cpu": 3}, {"nproc_per_node": 2, **TOLD}),
    "own bundles": (GROUP([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}]), {"nproc_per_node": 2, **TOLD}),
    "validations": ({"cpu": 3}, {"nproc_per_node": 2, "epochs": 2, "validate_every_n_steps": 2, **TOLD}),
    "stopped alone": ({"cpu": 3}, ENDLESS),
    "stopped workers": ({"cpu": 3}, {"nproc_per_node": 2, **ENDLESS}),
    "too small": (GROUP([{"CPU": 2}, {"CPU": 1}]), {"nproc_per_node": 2}),
}


def create_model(hidden_size):
    return torch.nn.Sequential(torch.nn.Linear(6, hidden_size), torch.nn.ReLU(), torch.nn.Linear(hidden_size, 2))


x = torch.randn(48, 6, generator=torch.Generator().manual_seed(3))
data = TensorDataset(x, (x.sum(1) > 0).long())
train_loader, val_loader = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)


class Heard(tune.Callback):
    """Record the epoch in every report of a sweep."""

    def __init__(self):
        self.rows = []

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.rows.append({name: result.get(name) for name in ("epoch", "step", "val_loss", "score")})


def train_fn(config):
    model = create_model(config["hidden_size"])
    trainer = RayTrainer(model, {"epochs": 6, **config}, global_batch_size=16)
    trainer.fit(train_loader, val_loader)
    trained = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    events = Path(trainer.history.run_dir, "result.json")
    best = trainer.best_accuracy
    return {"score": best, "val_accuracy": best, "trained": trained, "result": json.loads(events.read_text())}


def sweep(name):
    resources, more = KINDS[name]
    heard = Heard()
    analysis = tune.run(
        train_fn,
        config={"hidden_size": tune.choice([8]), "lr": tune.loguniform(0.02, 0.03), **more},
        num_samples=1,
        resources_per_trial=resources,
        stop=lambda trial_id, result: "stopped" in name and result["epoch"] == 3,
        # Tune needs its metric in every report. In the sweep "alone" only `train_fn` reports it.
        metric="score" if name == "alone" else "val_accuracy",
        mode="max", verbose=0, storage_path=str(OUT / "tune"), raise_on_failed_trial=False, callbacks=[heard],
    )  # fmt: skip
    (trial,) = analysis.trials
    best = analysis.best_config and analysis.best_config["hidden_size"]
    error = str(trial.get_error()) if trial.status == "ERROR" else None
    left = result_of(Path(trial.storage.trial_working_directory))
    return {"last": trial.last_result, "best": best, "error": error, "heard": heard.rows, "left": left}


def result_of(trial):
    """Return the result of a run, which ends a little after Tune has stopped the trial."""
    deadline = time.monotonic() + 20
    while True:
        (file,) = trial.glob("runs/*/result.json")
        left = json.loads(file.read_text())
        if left["status"] != "running" or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def main():
    ray_clusters.init(OUT / "ray", num_cpus=3)
    print(json.dumps({name: sweep(name) for name in sys.argv[2:]}, default=str))
    ray.shutdown()


if __name__ == "__main__":
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    main()
