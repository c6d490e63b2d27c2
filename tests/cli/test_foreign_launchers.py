"""Workers that torchrun started: the Trainer joins them, writes every rank's log, and trains as under our launcher."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys

import pytest

from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import launch_identity
from distributed.runs.directory import choose_run_dir, find_run_dir
from tests.conftest import free_port

SCRIPT = """
import os, sys, torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Kill(Callback):
    def on_step_end(self, state, result):
        who = [os.environ.get(name) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT")]
        if os.environ.get("KILL") == f"rank {who[0]} attempt {who[1]}" and state.step == 5:
            os.kill(os.getpid(), 9)

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(103, 8, generator=generator), torch.randint(0, 3, (103,), generator=generator))
trainer = Trainer(lambda: torch.nn.Linear(8, 3), epochs=2, batch_size=8, learning_rate=0.05, callbacks=[Kill()],
                  checkpoint_every_n_steps=3)
trainer.fit(data, data)
weight = trainer.model.weight.double().sum().item()
print(f"out of rank {trainer.setup.worker.rank}: {weight!r}")
print(f"err of rank {trainer.setup.worker.rank}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "train.py"
    path.write_text(SCRIPT)
    return path


def weight_of(text):
    return text.split("out of rank 0: ")[1].split()[0]


@pytest.mark.cluster
def test_under_torchrun_a_killed_run_goes_on_and_every_rank_has_a_log(script, run_python, run_cli, tmp_path):
    environment = {"OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "torchrun")]
    done = run_python(
        [*torchrun, "--max-restarts", "1", str(script)],
        cwd=tmp_path,
        env={**environment, "KILL": "rank 1 attempt 0"},
    )
    assert done.returncode == 0, done.output
    assert "resumed from step-00000003: step 3, epoch 1" in done.stdout
    assert done.stdout.count("finished at step") == 1
    assert done.output.count("warning: torchrun listens on all interfaces") == 1  # not again in the second attempt
    assert "out of rank 0" in done.stdout and "out of rank 1" not in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()  # one for both attempts, though nobody named it
    for rank in (0, 1):
        log = (run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert f"out of rank {rank}" in log and f"err of rank {rank}" in log

    ours = run_cli(["train", "--config", f"{run_dir}/config.yaml"], cwd=tmp_path, env=environment)
    assert "2 processes, device cpu" in ours.stdout, ours.output
    assert weight_of(ours.stdout) == weight_of(done.stdout)

    inside = run_python(
        [*torchrun, "-m", "distributed.cli", "train", "--script", str(script), "--epochs", "1", "--run-dir", "inside"],
        cwd=tmp_path,
        env=environment,
    )
    assert inside.returncode == 0, inside.output
    assert inside.output.count("warning: torchrun listens on all interfaces") == 1
    assert "epoch 1, in" in inside.stdout and (tmp_path / "inside" / "result.json").exists()


def test_python_on_a_plain_script_trains_in_this_process(script, start, tmp_path):
    command = [
        sys.executable,
        "-c",
        f"import os; os.environ['RANK'] = '0'; os.environ['WORLD_SIZE'] = '1'; exec({SCRIPT!r})",
    ]
    done = start(command, cwd=tmp_path).finish()
    assert done.returncode == 0 and "backend single, 1 process" in done.stdout
    assert "restarts by this launcher" not in done.stdout  # nobody restarts one process that was started by hand


def test_a_run_directory_that_only_rank_0_looks_at_ends_all_ranks_with_one_message(script, start, tmp_path):
    port = str(free_port())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", str(script), "--run-dir", "run"]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    ranks = [start(command, cwd=tmp_path, env={**world, "RANK": str(rank)}) for rank in (0, 1)]
    done = [rank.finish(120) for rank in ranks]

    assert [each.returncode for each in done] == [2, 2], done[0].output + done[1].output
    warned = [line for each in done for line in each.output.splitlines() if "without a secret" in line]
    assert len(warned) == 1 and f"warning: the processes rendezvous at 127.0.0.1:{port} without a secret" in warned[0]
    (message,) = [line for each in done for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: run directory 'run' is not empty: add --resume")


def test_only_a_restart_of_the_same_start_finds_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torchrun = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    by_torchrun = WorkerEnvironment(0, 0, 2, 2, 0, "127.0.0.1", 29500, 0, "environment")
    by_slurm = dataclasses.replace(by_torchrun, source="slurm")

    starts = [
        launch_identity(by_torchrun, torchrun),
        launch_identity(by_torchrun, {**torchrun, "TORCHELASTIC_RUN_ID": "a"}),
        launch_identity(by_torchrun, {**torchrun, "TORCHELASTIC_RUN_ID": "b"}),
        launch_identity(by_slurm, slurm),
        launch_identity(by_slurm, {**slurm, "SLURM_STEP_ID": "1"}),
    ]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    starts.append(launch_identity(by_torchrun, torchrun))

    assert len(set(starts)) == len(starts) and all(starts)
    assert launch_identity(by_torchrun, {}) is None  # by hand, or an operator that does not say so
    names = [choose_run_dir("train.py", identity) for identity in starts]
    for name in names:
        name.mkdir(parents=True)
    assert [find_run_dir("code/train.py", identity) for identity in starts] == names
    assert find_run_dir("other.py", starts[0]) is None


TOY = """
from distributed.launching.environments.base import ClusterEnvironment, WorkerEnvironment, number

def worker(at):
    if "TOY_TASK" not in at.environ:
        return None
    rank, size, port = (number(at.environ, f"TOY_{name}") for name in ("TASK", "TASKS", "PORT"))
    return WorkerEnvironment(rank, rank, size, size, 0, "127.0.0.1", port, 0, "toy")

ENTRY = ClusterEnvironment("toy", worker, listens="toyrun listens on all interfaces", job=lambda environ: environ["TOY_JOB"])
"""
REGISTERED = (
    "from distributed.launching.environments.registry import ENVIRONMENTS; ENVIRONMENTS.append(toy_environment.ENTRY)"
)
UNDER_TOY = f"""
import toy_environment
{REGISTERED}
{SCRIPT}"""
COMMAND = f"""
import sys
import toy_environment
{REGISTERED}
from distributed.cli.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


def test_a_cluster_environment_of_ones_own_is_one_file_and_one_entry(script, start, tmp_path):
    for name, text in (("toy_environment", TOY), ("under_toy", UNDER_TOY), ("command", COMMAND)):
        (tmp_path / f"{name}.py").write_text(text)
    port = str(free_port())
    world = {"TOY_TASKS": "2", "TOY_PORT": port, "TOY_JOB": "job 7", "OMP_NUM_THREADS": "1"}

    def run(words, **more):
        return start([sys.executable, *words], cwd=tmp_path, env={**world, **more})

    ranks = [run(["under_toy.py"], TOY_TASK=str(rank)) for rank in (0, 1)]
    done = [rank.finish(120) for rank in ranks]

    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    assert "backend pytorch-ddp, 2 processes" in done[0].stdout and "out of rank 0" in done[0].stdout
    assert sum(each.output.count("warning: toyrun listens on all interfaces") for each in done) == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.endswith(hashlib.sha256(b"job 7").hexdigest()[:8])  # a restart of this start finds it
    assert "out of rank 1" in (run_dir / "logs" / "rank-1.log").read_text()

    refused = run(["command.py", "train", "--script", str(script), "--nproc-per-node", "4"], TOY_TASK="0").finish(60)
    assert refused.returncode == 2 and "is not the number of processes of this run, 2" in refused.output
    misspelt = run(["command.py", "train", "--script", str(script)], TOY_TASK="first").finish(60)
    assert misspelt.returncode == 3 and "TOY_TASK='first' is not a whole number" in misspelt.output


LAST = """
import atexit, os, signal, subprocess
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

atexit.register(print, "after the last line")
Trainer(torch.nn.Linear(1, 1), loss_fn="mse", batch_size=4).fit(TensorDataset(torch.ones(8, 1), torch.ones(8, 1)))
(copying,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
os.kill(int(copying), signal.SIGSTOP)
go_on = ["sh", "-c", f"sleep 1; kill -CONT {copying}"]
subprocess.Popen(go_on, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("the last line")
"""


def test_a_worker_ends_when_its_output_has_been_copied(run_python, tmp_path):
    """`srun` kills what is left of a job when its workers have ended. The output is read as soon as the worker has ended."""
    (tmp_path / "job.py").write_text(LAST)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    done = run_python(["job.py"], cwd=tmp_path, env=place)
    assert done.returncode == 0 and done.stdout.splitlines()[-2:] == ["the last line", "after the last line"], (
        done.output
    )
    (log,) = tmp_path.glob("runs/*/logs/rank-0.log")
    assert log.read_text().splitlines()[-1].endswith("the last line")
