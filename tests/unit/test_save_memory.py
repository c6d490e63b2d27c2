"""A synchronous save of a large state takes little memory beside the state."""

from __future__ import annotations

from pathlib import Path

import pytest

_LIMIT_MB = 64
_STATE_MB = 300  # the weights and the two moments of AdamW

SCRIPT = """
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.checkpoints.store import CheckpointStore

save = CheckpointStore.save

def memory_mb(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(what))

def measured(*arguments):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_mb("VmRSS:")
    path = save(*arguments)
    with open(f"extra-{os.environ['RANK']}.txt", "a") as file:
        print(memory_mb("VmHWM:") - before, file=file)
    return path

CheckpointStore.save = measured
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))
data = TensorDataset(torch.ones(4, 1024), torch.ones(4, 1024))
Trainer(
    model, optimizer=torch.optim.AdamW(model.parameters()), loss_fn=torch.nn.functional.mse_loss, global_batch_size=4, epochs=1,
).fit(data)
"""


@pytest.mark.parametrize(("backend", "processes"), [("single", 1), ("fsdp", 2)])
def test_a_save_takes_little_memory_beside_the_state(run_cli, tmp_path: Path, backend: str, processes: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = ["train", "--script", "train.py", "--run-dir", "run", "--backend", backend]

    done = run_cli([*command, "--nproc-per-node", str(processes)], cwd=tmp_path)

    assert done.returncode == 0, done.output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors")) > _STATE_MB * 1e6
    extra_mb = [[float(line) for line in path.read_text().split()] for path in sorted(tmp_path.glob("extra-*.txt"))]
    assert len(extra_mb) == processes and all(len(saves) == 1 and saves[0] <= _LIMIT_MB for saves in extra_mb), extra_mb
