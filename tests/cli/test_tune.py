"""`distributed tune`: what it refuses at once, and sweeps of a script that end, are cut off and go on."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import sys

import pytest
import yaml

from tests import event_files, ray_clusters
from tests.conftest import needs_backend
from tests.ray_clusters import OPEN

CLI = [sys.executable, "-m", "distributed.cli"]
pytestmark = [pytest.mark.timeout(480), pytest.mark.xdist_group("a cluster of Ray")]
SCRIPT = """
import argparse, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from distributed import Callback, Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=4)
parser.add_argument("--crash", default="no")
parser.add_argument("--slow", type=float, default=0)
given = parser.parse_args()
if given.crash == "yes":
    raise ValueError(f"no way with {given.hidden}")

class Slow(Callback):
    def on_step_end(self, state, result):
        time.sleep(given.slow)

x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, (x.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(6, given.hidden), torch.nn.ReLU(), torch.nn.Linear(given.hidden, 2))
trainer = Trainer(model, epochs=6, learning_rate=1e-9, callbacks=[Slow()])
trainer.fit(DataLoader(data, batch_size=8, shuffle=True), data)
print("hidden", given.hidden)
"""
SPACE = "learning_rate: [0.1, 1e-6, 2e-6, 5e-6]\nhidden: [16]\n"


@pytest.fixture
def place(tmp_path):
    needs_backend("ray")
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of an existing cluster of two CPUs."""
    needs_backend("ray")
    with ray_clusters.head(tmp_path_factory.mktemp("cluster"), "--num-cpus=2", "--include-dashboard=false") as address:
        yield address


def command(place, *flags, space="space.yaml"):
    return [
        "tune", "--script", "train.py", "--search-space", str(place / space), "--search", "grid",
        "--run-dir", str(place / "sweep"), *flags,
    ]  # fmt: skip


def sweep_of(place):
    return json.loads((place / "sweep" / "sweep.json").read_text())


def journal(place):
    return [json.loads(line) for line in (place / "sweep" / "trials.jsonl").read_text().splitlines()]


def test_a_sweep_finds_the_best_and_train_repeats_it(run_cli, place):
    """Three of four are stopped early; the best one's settings give the same run again."""
    flags = ["--scheduler", "asha", "--seed", "5", "--max-concurrent", "1", "--tensorboard"]
    done = run_cli(command(place, *flags), timeout=150, cwd=place)
    assert done.returncode == 0 and done.stderr == "", done.output
    sweep = sweep_of(place)
    assert sweep["metric"] == "val_loss" and sweep["mode"] == "min" and 0 < sweep["trial_hours"] < 0.1
    assert [trial["status"] for trial in sweep["trials"]] == ["finished", "stopped", "stopped", "stopped"]
    assert sweep["trials"][0]["epochs"] == 6 > sweep["trials"][1]["epochs"]
    assert sweep["best"]["config"] == {"learning_rate": 0.1, "hidden": 16}
    lines = done.stdout.splitlines()
    assert lines[0] == "hidden is not a setting: the script gets it as --hidden"
    assert lines[1].startswith(
        "4 trials, 1 at once, 1 CPU each; search grid, scheduler asha; best is the smallest val_loss"
    )
    assert sum(line.startswith("trial 0000") for line in lines) == 4
    assert any(line.startswith("best: trial 00000  finished  6 epochs  val_loss ") for line in lines)
    for trial in sweep["trials"]:
        run = place / "sweep" / trial["run_dir"]
        assert (run / "metrics.jsonl").exists() and (run / "config.yaml").exists() and (run / "checkpoints").is_dir()
    assert "hidden 16" in (place / "sweep" / "trials" / "00000" / "logs" / "rank-0.log").read_text()
    assert_sessions(place / "sweep", event_files.sessions(place / "sweep"))
    happened = [(line["trial"], line["event"]) for line in journal(place) if line["event"] != "row"]
    assert happened == [(number, event) for number in range(4) for event in ("started", "ended")]  # one at a time
    best = yaml.safe_load((place / "sweep" / "best.yaml").read_text())
    assert best["script"] == "train.py" and best["learning_rate"] == 0.1 and best["script_args"] == ["--hidden", "16"]

    again = run_cli(
        ["train", "--config", str(place / "sweep" / "best.yaml"), "--run-dir", str(place / "again")], cwd=place
    )
    assert again.returncode == 0, again.output
    runs = (place / "again", place / "sweep" / "trials" / "00000")
    one, other = (json.loads((run / "result.json").read_text())["final_metrics"]["val_loss"] for run in runs)
    assert one == other
    stopped = place / "sweep" / "trials" / "00001"
    longer = run_cli(
        ["train", "--config", str(stopped / "config.yaml"), "--run-dir", str(stopped), "--resume"], cwd=place
    )
    assert longer.returncode == 0, longer.output
    assert json.loads((stopped / "result.json").read_text())["status"] == "finished"


def assert_sessions(sweep, shown):
    """TensorBoard's HParams tab has each trial with its values, also those that are no settings, and its last metrics."""
    for trial in json.loads((sweep / "sweep.json").read_text())["trials"]:
        values, metrics = shown.pop(f"{trial['run_dir']}/tensorboard")
        assert {name: values[name] for name in trial["config"]} == trial["config"]
        rows = map(json.loads, (sweep / trial["run_dir"] / "metrics.jsonl").read_text().splitlines())
        last = [row["loss"] for row in rows if row["split"] == "val"][-1]
        assert metrics["val/loss"] == pytest.approx(last, rel=1e-6)
    assert not shown


@pytest.mark.conformance
def test_killed_it_leaves_nobody_and_goes_on_where_each_trial_was(start, run_cli, place):
    command_ = command(place, "--mlflow-tracking", "--", "--slow", "0.03")
    first = start([*CLI, *command_], cwd=place)
    first.wait_for(lambda: (place / "sweep" / "trials.jsonl").exists() and sum(
        line.get("event") == "row" and line["row"]["epoch"] >= 2 for line in journal_so_far(place)) >= 2, 180)  # fmt: skip
    first.signal(signal.SIGKILL)
    done = first.finish(30, grace=20)  # fails where a process is left
    assert done.returncode == -signal.SIGKILL
    rows = len([line for line in journal_so_far(place) if line["event"] == "row"])
    refused = run_cli(command_, cwd=place)
    assert refused.returncode == 2 and "add --resume to continue" in refused.stderr, refused.output

    resumed = run_cli(
        [*command(place, "--mlflow-tracking", "--resume"), "--", "--slow", "0.03"], timeout=120, cwd=place
    )
    assert resumed.returncode == 0, resumed.output
    sweep = sweep_of(place)
    assert [trial["status"] for trial in sweep["trials"]] == ["finished"] * 4
    assert [trial["epochs"] for trial in sweep["trials"]] == [6] * 4
    assert len([line for line in journal(place) if line["event"] == "row"]) < rows + 24  # not all over again
    log = (place / "sweep" / "trials" / "00000" / "events.jsonl").read_text()
    assert '"resumed"' in log
    runs = mlflow_runs(place / "mlflow.db")
    (parent,) = [run_id for run_id, (name, _, above) in runs.items() if above is None]
    assert runs[parent] == ("sweep", "FINISHED", None)
    assert sorted(run for run in runs.values() if run[2] == parent) == [
        (f"0000{number}", "FINISHED", parent) for number in range(4)
    ]  # the same ones as before the kill
    assert len(runs) == 5


def mlflow_runs(database):
    """Run id -> name, status and the run above it, read without MLflow."""
    above = "left join tags on tags.run_uuid = runs.run_uuid and tags.key = 'mlflow.parentRunId'"
    with contextlib.closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(f"select runs.run_uuid, runs.name, status, tags.value from runs {above}").fetchall()
    return {run_id: tuple(rest) for run_id, *rest in rows}


def journal_so_far(place):
    """Without half a line that is being written."""
    found = []
    for line in (place / "sweep" / "trials.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@pytest.mark.conformance
def test_interrupted_it_writes_what_there_is(start, place, cluster):
    running = start([*CLI, *command(place, "--address", cluster), "--", "--slow", "0.05"], cwd=place, env=OPEN)
    journal_file = place / "sweep" / "trials.jsonl"
    running.wait_for(lambda: journal_file.exists() and '"row"' in journal_file.read_text(), 180)
    running.signal(signal.SIGINT)
    done = running.finish(60, grace=20)
    assert done.returncode == 130 and "Traceback" not in done.output, done.output
    sweep = sweep_of(place)
    assert {trial["status"] for trial in sweep["trials"]} == {"interrupted"} and sweep["best"] is not None
    results = [json.loads(path.read_text()) for path in (place / "sweep" / "trials").glob("*/result.json")]
    assert results and {result["status"] for result in results} == {"interrupted"}  # the second may not have begun
    assert (place / "sweep" / "best.yaml").exists() and not (place / "sweep" / ".stop").exists()


@pytest.mark.full
def test_a_metric_that_nobody_reports_ends_all_at_once(run_cli, place, cluster):
    done = run_cli(
        command(place, "--metric", "val_los", "--mode", "min", "--address", cluster), timeout=90, cwd=place, env=OPEN
    )
    assert done.returncode == 2, done.output
    (error,) = done.stderr.splitlines()
    assert error.startswith(
        "error: metric='val_los' is not reported (did you mean 'val_loss'?): choose one of val_loss, val_accuracy, loss"
    )


@pytest.mark.full
def test_a_script_that_always_crashes_is_told_by_its_cause(run_cli, place, cluster):
    (place / "space.yaml").write_text("hidden: [1, 2, 3, 4, 5, 6, 7, 8]\n")
    done = run_cli([*command(place, "--address", cluster), "--", "--crash", "yes"], timeout=90, cwd=place, env=OPEN)
    assert done.returncode == 1, done.output
    (error,) = done.stderr.splitlines()
    assert "trials failed before any metric: rank 0 failed with ValueError" in error and "no way with" in error
    assert len(sweep_of(place)["trials"]) < 8


@pytest.mark.parametrize(
    ("flags", "space", "code", "said"),
    [
        (["--scheduler", "ashe"], SPACE, 2, "did you mean 'asha'?"),
        (["--search", "random", "--num-samples", "0"], SPACE, 2, "num_samples='0' is not a whole number of at least 1"),
        (["--search", "random"], SPACE, 2, "set num_samples"),
        (["--search", "random", "--num-sample", "3"], SPACE, 2, "is not a flag of tune (did you mean '--num-samples'?)"),
        (["--nproc-per-node", "64"], SPACE, 3, "a trial needs 64 CPU"),
        (["--learning-rate", "1"], SPACE, 2, "learning_rate is in the search space and set to 1.0 too"),
        (["--checkpoint-dir", "x"], SPACE, 2, "would be shared by all trials"),
        (["--tensorboard-dir", "/proc/none"], SPACE, 2, "tensorboard_dir '/proc/none' cannot be written"),
        (["--mode", "low"], SPACE, 2, "choose min or max"),
        (["--scheduler", "pbt", "--max-concurrent", "1"], SPACE, 2, "max_concurrent=1 has no effect with scheduler='pbt'"),
        (["--global-batch-size", "10", "--batch-size", "4"], SPACE, 2, "is not a multiple of batch_size=4"),
        (["--dry-run", "--global-batch-size", "10"], "batch_size: [4, 8]", 2, "is not a multiple of batch_size=4"),
        (["--scheduler", "asha", "--scheduler-option", "grace_perio=1"], SPACE, 2, "did you mean 'grace_period'?"),
        ([], "", 2, "is empty: give each name its values"),
        ([], "learning_rate: {logunifrm: [1, 2]}", 2, "did you mean 'loguniform'?"),
        ([], "nproc_per_node: [1, 2]", 2, "nproc_per_node cannot be varied"),
        ([], "batch_size: [8, 0]", 2, "batch_size=0"),
        (["--search", "random", "--num-samples", "2"], "batch_size: {uniform: [16, 64]}", 2, "or randint instead of uniform in the search space"),
        ([], "lr: [0.1]\nlearning_rate: [0.2]", 2, "lr and learning_rate in the search space are the same setting"),
        ([], "'my x': [1, 2]", 2, "'my x' in the search space cannot be the name of an argument"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(run_cli, place, flags, space, code, said):
    (place / "space.yaml").write_text(space)
    done = run_cli(command(place, *flags), cwd=place)
    assert done.returncode == code and said in done.stderr and done.stderr.count("\n") == 1, done.output
    assert done.seconds < 60 and not (place / "sweep").exists()


def test_a_cluster_that_the_environment_names_decides_what_fits(run_cli, place):
    done = run_cli(command(place, "--nproc-per-node", "64"), cwd=place, env={"RAY_ADDRESS": "127.0.0.1:1"})
    assert done.returncode == 3 and "RAY_ADDRESS='127.0.0.1:1' does not answer" in done.stderr, done.output


def test_a_dry_run_shows_proposals_and_starts_nothing(run_cli, place):
    done = run_cli(command(place, "--dry-run"), cwd=place)
    assert done.returncode == 0 and "  00001  learning_rate=1e-06 --hidden 16" in done.stdout, done.output
    assert not (place / "sweep").exists() and done.seconds < 60
