"""Workers that torchrun started: the Trainer joins them, writes every rank's log, and trains as under our launcher."""

from __future__ import annotations

import sys

import pytest

SCRIPT = """
import sys, torch
from torch.utils.data import TensorDataset
from distributed import Trainer

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(103, 8, generator=generator), torch.randint(0, 3, (103,), generator=generator))
trainer = Trainer(lambda: torch.nn.Linear(8, 3), epochs=2, batch_size=8, learning_rate=0.05)
trainer.fit(data, data)
weight = trainer.model.weight.double().sum().item()
print(f"out of rank {trainer._worker.rank}: {weight!r}")
print(f"err of rank {trainer._worker.rank}", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("foreign") / "train.py"
    path.write_text(SCRIPT)
    return path


def weight_of(text):
    return text.split("out of rank 0: ")[1].split()[0]


def test_under_torchrun_every_rank_has_a_log_and_the_console_shows_rank_0(script, run_python, run_cli, tmp_path):
    environment = {"OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "torchrun")]
    done = run_python([*torchrun, str(script)], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.output
    assert done.stdout.count("finished at step") == 1
    assert "out of rank 0" in done.stdout and "out of rank 1" not in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        log = (run_dir / "logs" / f"rank-{rank}.log").read_text()
        assert f"out of rank {rank}" in log and f"err of rank {rank}" in log

    ours = run_cli(["train", "--script", str(script), "--nproc-per-node", "2"], cwd=tmp_path, env=environment)
    assert weight_of(ours.stdout) == weight_of(done.stdout)

    inside = run_python(
        [*torchrun, "-m", "distributed.cli", "train", "--script", str(script), "--epochs", "1", "--run-dir", "inside"],
        cwd=tmp_path,
        env=environment,
    )
    assert inside.returncode == 0, inside.output
    assert "epoch 1, in" in inside.stdout and (tmp_path / "inside" / "result.json").exists()


def test_python_on_a_plain_script_trains_in_this_process(script, start, tmp_path):
    command = [
        sys.executable,
        "-c",
        f"import os; os.environ['RANK'] = '0'; os.environ['WORLD_SIZE'] = '1'; exec({SCRIPT!r})",
    ]
    done = start(command, cwd=tmp_path).finish()
    assert done.returncode == 0 and "backend single, 1 process" in done.stdout
