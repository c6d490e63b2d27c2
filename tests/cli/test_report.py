"""`distributed report`, and the report that is there when a run has ended, however it ended."""

from __future__ import annotations

import json
import re

import pytest

from tests.unit.report_files import write_run, write_sweep

# Rank 1 is killed in the first attempt, after a checkpoint.
SCRIPT = """
import os, signal
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Kill(Callback):
    def on_checkpoint(self, state, path):
        if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
Trainer(torch.nn.Linear(4, 1), callbacks=[Kill()], batch_size=4, epochs=3, log_every_n_steps=2).fit(data, data)
"""


def data_of(file):
    return json.loads(re.search(r'id="page-data">(.*?)</script>', file.read_text(), re.S).group(1))


@pytest.fixture(scope="module")
def killed(tmp_path_factory, run_cli_once):
    """The run directory of a run that lost a worker and went on."""
    directory = tmp_path_factory.mktemp("killed")
    (directory / "script.py").write_text(SCRIPT)
    done = run_cli_once(
        ["train", "--script", "script.py", "--backend", "pytorch-ddp", "--nproc-per-node", "2", "--run-dir", "run"],
        cwd=directory,
    )
    assert done.returncode == 0, done.output
    return directory / "run"


def test_a_run_leaves_a_report_with_what_happened_to_it(killed):
    text = (killed / "report.html").read_text()
    panels = {panel["title"]: panel for panel in data_of(killed / "report.html")["panels"]}

    assert '<dd class="good">finished</dd>' in text
    assert {line["name"] for line in panels["Loss"]["lines"]} == {"train", "validation"}
    drawn = panels["Loss"]["lines"][0]["data"]["step"]
    assert drawn == sorted(drawn) and drawn[-1] == 24  # 3 epochs of 64 samples in updates of 8
    assert {"worker failed", "restarted", "resumed", "checkpoint", "finished"} <= {
        line["name"] for line in panels["Events"]["lines"]
    }
    assert [mark["text"] for mark in panels["Loss"]["marks"]] == ["worker failed", "restarted", "resumed"]
    assert [line["name"] for line in panels["Time of each rank"]["lines"]] == ["rank 0", "rank 1"]


def test_the_command_writes_it_anew_and_says_where(killed, run_cli, tmp_path):
    (killed / "report.html").unlink()
    done = run_cli(["report", str(killed)], cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, f"{killed / 'report.html'}\n", "")
    assert data_of(killed / "report.html")["panels"][0]["title"] == "Loss"


def test_several_runs_get_a_file_each_or_one_together(run_cli, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    done = run_cli(["report", "a", "b"], cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["a/report.html", "b/report.html"]), done.output
    done = run_cli(["report", "a", "b", "--compare"], cwd=tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["compare.html"]), done.output
    assert {line["name"] for line in data_of(tmp_path / "compare.html")["panels"][0]["lines"]} == {"a", "b"}


def test_a_sweep_directory_gets_its_own_page(run_cli, tmp_path):
    write_sweep(tmp_path / "sweep")
    done = run_cli(["report", "sweep", "--output", "page.html"], cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, "page.html\n"), done.output
    assert data_of(tmp_path / "page.html")["panels"][0]["title"] == "Trials"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none"], "run 'none' does not exist: name a run directory"),
        (["."], "it contains runs, such as 'run': name a run"),
        (["run", "--compare"], "--compare needs two or more runs: name another one"),
        (["run", "run", "--output", "x.html"], "add --compare, or drop --output"),
        (["run", "--output", "run"], "--output 'run' is a directory"),
        (["run", "--output", "none/x.html"], "'none/x.html' cannot be written (No such file or directory)"),
        (["run", "--output", "run/config.yaml/x.html"], "'run/config.yaml/x.html' cannot be written (Not a directory)"),
        ([], "Missing argument 'RUN...'"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    from distributed.cli.__main__ import main

    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and said in error and error.count("\n") == 1, error
