"""A killed run with several loggers in one list: none of them misses a step."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests import event_files
from tests.conformance.test_mlflow import client_of
from tests.conftest import needs_library
from tests.unit.test_wandb import records

JOB = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Logger, Trainer

class Lines(Logger):
    def open(self, run):
        self.file = open(run.run_dir / "lines.txt", "a")

    def log_metrics(self, step, metrics):
        print(step, *metrics, file=self.file, flush=True)

class Kill(Callback):
    def on_step_end(self, state, result):
        if state.step == 6 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

data = TensorDataset(torch.arange(64.0).reshape(32, 2) / 64, torch.arange(32) % 3)
trainer = Trainer(
    lambda: torch.nn.Linear(2, 3), loggers=["tensorboard", "mlflow", "wandb", "csv", Lines()], callbacks=[Kill()], epochs=1,
    global_batch_size=4, log_every_n_steps=1, checkpoint_every_n_steps=2, device="cpu",
)
trainer.fit(data, data)
"""
STEPS = list(range(1, 9))
pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),  # MLflow's store
]


@pytest.fixture(scope="module")
def run_dir(run_cli_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run that was killed after step 6, and went on from step 4 or 6 by itself."""
    for library in ("mlflow", "wandb", "tensorboard"):
        needs_library(library, "pytorch-ddp")
    home = tmp_path_factory.mktemp("loggers")
    (home / "train.py").write_text(JOB)
    flags = ["--backend", "pytorch-ddp", "--nproc-per-node", "1", "--max-restarts", "1", "--run-dir", "run"]
    done = run_cli_once(["train", "--script", "train.py", *flags], cwd=home, env={"WANDB_MODE": "offline"}, timeout=120)
    assert done.returncode == 0 and "restarting (1 of 1)" in done.stderr, done.output
    return home / "run"


def test_the_files_have_each_step_once(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["split"] == "train"] == STEPS
    with (run_dir / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table if row["loss"]] == STEPS


def test_tensorboard_has_each_step_once(run_dir: Path) -> None:
    (directory,) = {path.parent for path in run_dir.rglob("events.out.tfevents.*")}
    assert event_files.steps(event_files.read(directory), "train/loss") == STEPS


def test_mlflow_has_each_step_once(run_dir: Path) -> None:
    client = client_of(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    (found,) = [run for each in client.search_experiments() for run in client.search_runs([each.experiment_id])]
    assert found.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(found.info.run_id, "loss")] == STEPS


def test_weights_and_biases_misses_no_step_under_one_id(run_dir: Path) -> None:
    """Its library keeps values in memory, so those of the last two seconds are logged again after a kill."""
    attempts = records(run_dir)
    assert len({name for name, _ in attempts}) == 1 and len(attempts) == 2
    items = [row.history.item for _, rows in attempts for row in rows if row.HasField("history")]
    values = [{item.key or "/".join(item.nested_key): item.value_json for item in each} for each in items]
    assert sorted({int(each["step"]) for each in values if "loss" in each}) == STEPS


def test_a_logger_of_ones_own_misses_no_step(run_dir: Path) -> None:
    """The calls just before a kill may be repeated, if their delivery was not recorded."""
    lines = [line.split() for line in (run_dir / "lines.txt").read_text().splitlines()]
    steps = [int(step) for step, *names in lines if "loss" in names]
    assert list(dict.fromkeys(steps)) == STEPS and steps[-2:] == STEPS[-2:]
