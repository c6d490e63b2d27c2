"""`distributed runs` lists runs in every state, and `distributed status` follows one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.__main__ import main
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.runs.listing import read_state_of
from tests.conftest import Finished, Started, poll

SCRIPT = """
import os, time
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Wait(Callback):
    def on_step_end(self, state, result):
        while not os.path.exists("go"):
            time.sleep(0.05)

data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
Trainer(torch.nn.Linear(4, 1), callbacks=[Wait()], batch_size=4, epochs=2, log_every_n_steps=2, checkpoint_at_start=True).fit(data, data)
"""


def run_files(path: Path, **result: Any) -> None:
    path.mkdir(parents=True)
    (path / "result.json").write_text(
        json.dumps({"backend": "fsdp", "world_size": 16, "num_nodes": 2, "steps": 120, "epochs": 3} | result)
    )
    RunDirectory(path).event("started", step=0)


def test_status_follows_a_run_to_its_end_and_runs_lists_it(
    start: Callable[..., Started], run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    cli = [sys.executable, "-m", "distributed.cli"]
    training = start(
        [*cli, "train", "--script", "script.py", "--device", "cpu", "--run-dir", "runs/first"], cwd=tmp_path
    )
    poll(lambda: (tmp_path / "runs/first/result.json").exists(), 60, lambda: training.output)

    listed = run_cli(["runs"], cwd=tmp_path)
    assert re.search(r"^first +running +single +1x1 +0 ", listed.stdout, re.M), listed.output
    following = start([*cli, "status", "runs/first"], cwd=tmp_path)
    following.wait_for("status      running")
    (tmp_path / "go").touch()

    assert training.finish().returncode == 0
    text = following.finish().stdout
    assert re.search(r"^step 2  epoch 1 .*loss [\d.]+", text, re.M), text
    assert re.search(r"^epoch 2  val_loss [\d.]+", text, re.M), text
    assert re.search(r"^\d\d:\d\d:\d\d  checkpoint saved at step 8  step-00000008$", text, re.M), text
    assert text.endswith("finished at step 8\n")
    assert re.search(
        r"^first +finished +single +1x1 +8 +val_loss [\d.]+ ", run_cli(["runs"], cwd=tmp_path).stdout, re.M
    )


def test_a_run_whose_processes_are_gone_is_called_killed(
    start: Callable[..., Started], run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    training = start(
        [
            sys.executable,
            "-m",
            "distributed.cli",
            "train",
            "--script",
            "script.py",
            "--device",
            "cpu",
            "--run-dir",
            "run",
        ],
        cwd=tmp_path,
    )
    poll(lambda: (tmp_path / "run/result.json").exists(), 60, lambda: training.output)
    assert "status      running" in run_cli(["status", "run", "--once"], cwd=tmp_path).stdout

    for pid in training.alive():
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not training.alive(), 20, lambda: "still alive")

    assert "status      killed" in run_cli(["status", "run"], cwd=tmp_path).stdout
    assert json.loads(run_cli(["runs", ".", "--json"], cwd=tmp_path).stdout)[0]["status"] == "killed"


def test_the_table_fits_into_eighty_columns_and_names_what_failed(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    name = "train_large_model-20261123-050711-fdbe"
    run_files(
        tmp_path / "runs" / name,
        status="failed",
        best_metrics={"val_loss": 0.125, "loss": 0.5},
        error="ValueError: bad\nvalue",
    )
    run_files(tmp_path / "runs" / "short", status="interrupted", best_metrics={"loss": None})

    table = run_cli(["runs"], cwd=tmp_path, env={"COLUMNS": "80"}).stdout.splitlines()

    assert max(map(len, table)) <= 80 and len(table) == 3, table
    assert re.search(rf"^{name} failed +fsdp +2x8 +120 +0.125 +\d+ s$", table[-1]) or re.search(
        rf"^{name} failed", table[-2]
    )
    assert "  error       ValueError: bad" in run_cli(["status", f"runs/{name}"], cwd=tmp_path).stdout


def test_a_narrow_table_names_the_metric_unless_all_runs_have_the_same(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    name = "train_large_model-20261123-050711-fdbe"
    run_files(tmp_path / "runs" / name, status="finished", best_metrics={"val_accuracy": 0.125})
    run_files(tmp_path / "runs" / "other", status="finished", best_metrics={"val_loss": 0.5})

    table = run_cli(["runs"], cwd=tmp_path, env={"COLUMNS": "80"}).stdout

    assert "val_accuracy 0.125" in table and "val_loss 0.5" in table and max(map(len, table.splitlines())) <= 80


def test_a_failure_before_the_last_start_is_not_that_of_the_run(tmp_path: Path) -> None:
    run_files(tmp_path / "run", status="running")
    run = RunDirectory(tmp_path / "run")
    run.event("worker_failed", cause="rank 0 was killed by SIGKILL")
    assert read_state_of(run.path).error == "rank 0 was killed by SIGKILL"
    run.event("started", step=5)
    assert read_state_of(run.path).error is None


def test_a_node_that_is_not_node_0_knows_its_own_part(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "part")
    run.prove_part("node 1 of a run of node0")
    assert read_state_of(run.path).status == "starting"
    run.logs.mkdir()
    for rank in (3, 12):
        (run.logs / f"rank-{rank}.log").touch()
    run.event("started", backend="pytorch-ddp", num_nodes=4, world_size=16, restart_count=0, step=0)
    run.event("checkpoint_saved", step=20)
    run.event("worker_failed", cause="rank 3 was killed")
    run.event("started", backend="pytorch-ddp", num_nodes=4, world_size=16, restart_count=1, step=20)

    state = read_state_of(run.path)
    assert (state.part_of, state.ranks, state.status) == ("node 1 of a run of node0", (3, 12), "running")
    assert (state.num_nodes, state.world_size, state.step, state.restarts, state.error) == (4, 16, 20, 1, None)

    run.unlock()  # as when the launcher is killed
    assert read_state_of(run.path).status == "killed"
    for event, status in (
        ("node_failed", "failed"),
        ("preempted", "interrupted"),
        ("regrouped", "interrupted"),
        ("worker_failed", "failed"),
        ("finished", "finished"),
    ):
        run.event(event, step=30, cause="rank 3 was killed")
        state = read_state_of(run.path)
        assert (state.status, state.step, state.is_over) == (status, 30, True)


@pytest.mark.parametrize(
    ("steps", "epochs", "row", "logged", "expected"),
    [
        (0, 0, {}, None, 0),
        (20, 0, {}, None, 1),  # saved before the first log line
        (20, 0, {"loss": 1.0}, (25, 0), 1),
        (32, 1, {"step": 32, "epoch": 1}, (32, 0), 1),  # the end of an epoch
        (35, 1, {"step": 32, "epoch": 1}, (32, 0), 2),  # saved in the second one, before its first log line
        (32, 1, {"step": 32, "epoch": 1}, (40, 1), 2),
        (128, 4, {"step": 128, "epoch": 4}, (128, 3), 4),
        (128, 4, {"step": 128, "epoch": 4}, (128, 4), 4),  # validated after the last epoch
    ],
)
def test_epochs_count_as_on_the_console(
    tmp_path: Path, steps: int, epochs: int, row: dict[str, Any], logged: tuple[int, int] | None, expected: int
) -> None:
    run_files(tmp_path / "run", status="running", steps=steps, epochs=epochs, final_metrics=row)
    if logged is not None:
        line = {"step": logged[0], "epoch": logged[1], "time": 1.0, "split": "train"}
        (tmp_path / "run/metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert read_state_of(tmp_path / "run").epoch == expected


def test_status_wraps_long_texts_but_no_paths(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    path, words = f"/{'long/' * 20}train.py", "rank 1 failed with ValueError: " + "no such thing " * 10
    run_files(tmp_path / "run", status="failed", error=f"{words}in {path}")
    lines = run_cli(["status", "run"], cwd=tmp_path, env={"COLUMNS": "80"}).stdout.splitlines()
    assert all(len(line) <= 80 or line.strip() == path for line in lines), lines
    assert " ".join(" ".join(lines).split()).endswith(f"error {' '.join(words.split())} in {path}")


@pytest.mark.parametrize("words", [["runs", "missing"], ["status", "missing"], ["status", "."]])
def test_a_wrong_directory_is_an_error_of_one_line(
    run_cli: Callable[..., Finished], tmp_path: Path, words: list[str]
) -> None:
    done = run_cli(words, cwd=tmp_path)

    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "error: " in done.stderr


@pytest.mark.parametrize(
    "words", [["status", "ours", "--once"], ["why", "ours"], ["report", "ours"], ["checkpoint", "list", "ours"]]
)
def test_a_run_in_runs_may_be_named_as_the_table_names_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_files(tmp_path / "runs" / "ours", status="finished", best={"val_loss": 0.5})
    (tmp_path / "runs" / "ours" / "metrics.jsonl").write_text(
        '{"split": "val", "step": 8, "epoch": 1, "val_loss": 0.5}\n'
    )
    monkeypatch.chdir(tmp_path)
    found = []
    for name in ("ours", "runs/ours"):
        with contextlib.suppress(SystemExit):
            main([name if word == "ours" else word for word in words])
        found.append(capsys.readouterr())
    assert found[0] == found[1] and "does not exist" not in found[0].err


def test_without_a_run_there_is_a_line_that_says_so(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    assert run_cli(["runs"], cwd=tmp_path).stdout == "no runs in runs\n"


def test_a_directory_of_runs_is_no_run_and_the_command_that_lists_it_is_named(tmp_path: Path) -> None:
    run_files(tmp_path / "my grid" / "0")
    with pytest.raises(
        ConfigError, match=r"is not a run directory: name a run, 'distributed runs '.*/my grid'' lists those in it$"
    ):
        read_state_of(tmp_path / "my grid")
    with pytest.raises(ConfigError, match=r"'distributed runs' lists those in ./runs$"):
        read_state_of(tmp_path)
