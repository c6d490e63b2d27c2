"""Run sweeps on one local cluster of two CPUs. Prints one JSON line, with the facts of each sweep by its name.

sweeps.py OUT KIND   KIND: "few", for `make test`, or "more". The last sweep of each kind runs until a signal ends it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.parse
from fractions import Fraction
from pathlib import Path

import ray
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, DistributedError, DistributedTuner, Trainer
from distributed.cli.mlflow_sync import mlflow_sync
from tests import ray_clusters

OUT = Path(sys.argv[1])
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(x, (x.sum(1) > 0).long())
loader = DataLoader(data, batch_size=8, shuffle=True)
EPOCHS = 9


def model():
    return torch.nn.Linear(8, 2)


def bowl(config):
    return {
        "score": (config["a"] - 3) ** 2 + config.get("b", 0),
        "note": str(config["a"]),
        "as_object": Fraction(2),
    }


def trained(config):
    """Train. The Trainer reports by itself, and printed text goes into the log of the trial."""
    print("rate", config["lr"])
    Trainer(model(), config, epochs=EPOCHS).fit(loader, data)


def on_two_processes(config):
    Trainer(model(), config, epochs=3, nproc_per_node=2).fit(loader, data)
    return {"threads": torch.get_num_threads()}


def dies_once(config):
    """Train in a process that dies after four epochs in the first attempt."""
    flag = OUT / "died"

    class Death(Callback):
        def on_epoch_end(self, state, metrics):
            if state.epoch == 4 and not flag.exists():
                flag.touch()
                os._exit(7)

    Trainer(model(), {"lr": config["lr"]}, epochs=6, callbacks=[Death()]).fit(loader, data)


def crashes(config):
    raise ValueError(f"no way with {config['a']}")


def crashes_at_two(config):
    if config["a"] == 2:
        raise ValueError("two is too much")
    return float(config["a"])


def slow(config):
    time.sleep(0.2)
    return {"score": config["a"], "pid": float(os.getpid())}


lock = threading.Lock()


def holds_a_lock(config):
    with lock:
        return float(config["a"])


def tuner(name, train_fn, space, **settings):
    more = {"metric": "score", "mode": "min", "num_gpus": 0, "trials_per_gpu": 1, **settings}
    return DistributedTuner(train_fn=train_fn, search_space=space, run_dir=OUT / name, **more)


def sweep_of(name):
    return json.loads((OUT / name / "sweep.json").read_text())


def endless(config):
    print("pid", os.getpid())
    Trainer(model(), {"lr": config["lr"]}, epochs=10**6).fit(loader, data)


def told(function):
    """Return the text of an error, and the seconds until it was raised."""
    began = time.monotonic()
    try:
        function()
    except DistributedError as error:
        return {"type": type(error).__name__, "said": str(error), "seconds": time.monotonic() - began}
    return None


def grid():
    made = tuner("grid", bowl, {"a": [1, 2, 3, 4], "b": [0, 10]}, search="grid")
    best = made.tune()
    table = made.results
    return {"best": best, "columns": list(table.columns), "rows": len(table), "first": table.iloc[0].to_dict()}


def trained_by_name(config):
    """Train with the optimizer and the schedule of the trial, and validate also in the middle of an epoch of eight updates."""
    Trainer(model(), config, epochs=2, validate_every_n_steps=5).fit(loader, data)


def named():
    """Run a sweep over names of optimizers and of schedules."""
    space = {"optimizer": ["sgd", "adafactor"], "scheduler": ["linear", "wsd"]}
    tuner("named", trained_by_name, space, metric="val_loss", search="grid").tune()
    lines = [json.loads(line) for line in (OUT / "named" / "trials.jsonl").read_text().splitlines()]
    return [
        {
            "values": trial["config"], "loss": trial["metrics"]["val_loss"],
            "config": yaml.safe_load((OUT / "named" / trial["run_dir"] / "config.yaml").read_text()),
            "rows": [
                (line["row"]["step"], line["row"]["validations"])
                for line in lines if line["event"] == "row" and line["trial"] == int(trial["id"])
            ],
        }
        for trial in sweep_of("named")["trials"]
    ]  # fmt: skip


def optuna():
    space = {"a": {"uniform": [0, 10]}}
    best = tuner("optuna", bowl, space, search="optuna", seed=1).tune(13)  # a few more than the random trials
    return {"best": best["a"], "tried": [trial["config"]["a"] for trial in sweep_of("optuna")["trials"]]}


def own(name, values):
    """Run a sweep on a cluster of its own, one trial at a time."""
    best = tuner(name, slow, {"a": values}, search="grid", max_concurrent=1).tune()
    lines = [json.loads(line) for line in (OUT / name / "trials.jsonl").read_text().splitlines()]
    return {"best": best, "happened": [(line["trial"], line["event"]) for line in lines]}


def asha():
    space = {"lr": [0.3, 1e-6, 1e-5, 2e-6, 0.2, 3e-6, 1e-7, 5e-6]}
    made = tuner("asha", trained, space, metric="val_loss", scheduler="asha", search="grid")
    best = made.tune()
    trainer = made.best_trainer()
    statuses = {trial["config"]["lr"]: (trial["status"], trial["epochs"]) for trial in sweep_of("asha")["trials"]}
    stopped = next(trial for trial in sweep_of("asha")["trials"] if trial["status"] == "stopped")
    row = sweep_of("asha")["best"]["metrics"]
    return {
        "best": best, "statuses": statuses, "row": row, "again": trainer.evaluate(data)["loss"],
        "history": [entry["epoch"] for entry in trainer.history.rows], "checkpoint": str(made.best_checkpoint),
        "stopped": json.loads((OUT / "asha" / stopped["run_dir"] / "result.json").read_text())["status"],
        "log": (OUT / "asha" / "trials" / "00000.log").read_text(),
    }  # fmt: skip


def pbt():
    """Run four trials on two CPUs. They take turns, and the worse ones continue from the checkpoints of the better ones."""
    space = {"lr": {"loguniform": [1e-6, 0.3]}}
    options = {"perturbation_interval": 2, "quantile_fraction": 0.5}
    made = tuner("pbt", trained, space, metric="val_loss", scheduler="pbt", scheduler_options=options, seed=3)
    made.tune(4)
    lines = [json.loads(line) for line in (OUT / "pbt" / "trials.jsonl").read_text().splitlines()]
    trials = sweep_of("pbt")["trials"]
    clones = [line["trial"] for line in lines if line.get("cloned") is not None]
    logs = "".join((OUT / "pbt" / "trials" / f"{number:05d}.log").read_text() for number in set(clones))
    return {
        "epochs": [trial["epochs"] for trial in trials], "statuses": [trial["status"] for trial in trials],
        "num_cloned": len(clones), "turns": sum(line["event"] == "started" for line in lines),
        "rate_replaced": "replaces the checkpoint's" in logs, "losses": [trial["metrics"]["val_loss"] for trial in trials],
    }  # fmt: skip


def hyperband():
    space = {"lr": [0.3, 1e-6, 1e-5, 0.2, 2e-6, 3e-6]}  # three trials that run to the end, and a bracket of three
    made = tuner(
        "hyperband", trained, space, metric="val_loss", scheduler="hyperband", search="grid",
        scheduler_options={"max_t": EPOCHS},
    )  # fmt: skip
    return {"best": made.tune(), "epochs": [trial["epochs"] for trial in sweep_of("hyperband")["trials"]]}


def distributed_trials():
    space = {"lr": [0.3, 1e-6]}
    made = tuner("two", on_two_processes, space, metric="val_loss", search="grid", resources_per_trial={"cpu": 2})
    made.tune()
    results = [json.loads((OUT / "two" / "trials" / name / "result.json").read_text()) for name in ("00000", "00001")]
    lines = [json.loads(line) for line in (OUT / "two" / "trials.jsonl").read_text().splitlines()]
    return {
        "worlds": [result["world_size"] for result in results], "order": [line["event"] for line in lines],
        "epochs": [trial["epochs"] for trial in sweep_of("two")["trials"]],
    }  # fmt: skip


def died():
    once = tuner("once", dies_once, {"lr": [0.1]}, metric="val_loss", search="grid", max_failures=1)
    once.tune()
    lines = [json.loads(line) for line in (OUT / "once" / "trials.jsonl").read_text().splitlines()]
    return {
        "retried": [line["event"] for line in lines],
        "epochs": [line["row"]["epoch"] for line in lines if line["event"] == "row"],
    }


def failures():
    some = tuner("some", crashes_at_two, {"a": [1, 2, 3]}, mode="max", search="grid")
    return {
        "some": some.tune(), "errors": [trial.get("error") for trial in sweep_of("some")["trials"]],
        "all": told(lambda: tuner("all", crashes, {"a": [1, 2, 3, 4, 5, 6, 7, 8]}, search="grid").tune()),
        "crashed": len(sweep_of("all")["trials"]), "log": (OUT / "all" / "trials" / "00000.log").read_text(),
    }  # fmt: skip


def refusals():
    return {
        "unknown": told(lambda: tuner("unknown", trained, {"lr": [0.1, 0.2]}, metric="val_los", mode="min", search="grid").tune()),
        "too much": told(lambda: tuner("much", bowl, {"a": [1]}, resources_per_trial={"cpu": 64}, search="grid").tune()),
        "no gpus": told(lambda: tuner("gpus", bowl, {"a": [1]}, num_gpus=32, search="grid").tune()),
        "a lock": told(lambda: tuner("lock", holds_a_lock, {"a": [1]}, search="grid").tune()),
        "misspelt": told(lambda: tuner("misspelt", bowl, {"a": [1]}, schedulr="asha")),
        "shared": told(lambda: tuner("shared", bowl, {"a": [1]}, checkpoint_dir="here")),
        "early": told(lambda: tuner("early", bowl, {"a": [1]}).best_params),
    }  # fmt: skip


def resumed_side_by_side():
    return resume(2, "side-by-side-")


def resume(max_concurrent=1, name=""):
    settings = {"seed": 7, "max_concurrent": max_concurrent}
    first = tuner(name + "resume", slow, {"a": {"uniform": [0, 1]}}, **settings)
    first.tune(3)
    again = tuner(name + "resume", slow, {"a": {"uniform": [0, 1]}}, **settings, resume=True)
    again.tune(5)
    whole = tuner(name + "whole", slow, {"a": {"uniform": [0, 1]}}, **settings)
    whole.tune(5)
    lines = [json.loads(line) for line in (OUT / f"{name}resume" / "trials.jsonl").read_text().splitlines()]
    return {
        "started": [line["trial"] for line in lines if line["event"] == "started"],
        "same": [trial["config"] for trial in sweep_of(f"{name}resume")["trials"]] == [t["config"] for t in sweep_of(f"{name}whole")["trials"]],
        "no trainer": told(whole.best_trainer),
        "processes": len({trial["metrics"]["pid"] for trial in sweep_of(f"{name}whole")["trials"]}),
    }  # fmt: skip


def tracked():
    """Track sweeps in MLflow with an SQLite file.

    Some trials have a Trainer, of which some stop early. Others have none. The server of one sweep is gone.
    """
    space = {"lr": [0.3, 1e-6, 1e-7]}
    both = {"mlflow_tracking": True, "tensorboard": True}
    first = tuner("tracked", trained, space, metric="val_loss", scheduler="asha", search="grid", **both)
    first.tune()
    tuner("bowls", crashes_at_two, {"a": [1, 2]}, mode="max", search="grid", mlflow_tracking=True).tune()
    os.environ["MLFLOW_TRACKING_URI"] = "http://127.0.0.1:1"
    tuner("gone", trained, {"lr": [0.3]}, metric="val_loss", search="grid", mlflow_tracking=True).tune()
    os.environ["MLFLOW_TRACKING_URI"] = uri = f"sqlite:///{OUT / 'mlflow.db'}"
    mlflow_sync(OUT / "gone")
    del os.environ["MLFLOW_TRACKING_URI"]
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [each.experiment_id for each in client.search_experiments()]
    runs = {
        run.info.run_id: {
            "name": run.info.run_name, "status": run.info.status, "params": run.data.params, "tags": run.data.tags,
            "metrics": run.data.metrics, "experiment": run.info.experiment_id, "artifacts": _artifacts(run),
        }
        for run in client.search_runs(experiments)
    }  # fmt: skip
    trials = sweep_of("tracked")["trials"]
    return {
        "runs": runs,
        "trials": trials,
        "best": sweep_of("tracked")["best"],
        "again": first.best_trainer().evaluate(data)["loss"],
    }


def _artifacts(run):
    place = Path(urllib.parse.urlparse(run.info.artifact_uri).path)
    return sorted(path.name for path in place.glob("*"))


SWEEPS = {
    "few": (grid, named, failures, refusals),
    "more": (died, resume, resumed_side_by_side, asha, distributed_trials, optuna, pbt, hyperband, tracked),
}


def main(kind):
    found = {"own": own("own", [1, 2, 3])} if kind == "more" else {}
    ray_clusters.init(OUT / "ray", num_cpus=2)
    for sweep in SWEEPS[kind]:
        found[sweep.__name__] = sweep()
    free = time.monotonic() + 20
    while ray.available_resources().get("CPU") != 2 and time.monotonic() < free:
        time.sleep(0.1)
    found["free"] = ray.available_resources().get("CPU")
    groups = ray.util.placement_group_table().values()
    found["groups left"] = [group["state"] for group in groups if group["state"] != "REMOVED"]
    ray.shutdown()
    print(json.dumps(found, default=str), flush=True)
    tuner(kind, endless, {"lr": [0.1, 0.2, 0.3]}, metric="val_loss", search="grid", max_concurrent=2).tune()


if __name__ == "__main__":
    main(sys.argv[2])
