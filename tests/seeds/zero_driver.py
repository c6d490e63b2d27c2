"""The samples for DeepSpeed, on two processes of one launch."""

from __future__ import annotations

import os
import types
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import PyTorchDDPTrainer
from tests.seeds.running import run, run_all

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 8, generator=generator)
DATA = TensorDataset(inputs, inputs[:, :3].argmax(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def trained(trainer: PyTorchDDPTrainer) -> None:
    history = trainer.fit(DATA, DATA, epochs=2)
    assert (trainer.plan.backend, trainer.backend.stage, history.steps) == (
        "deepspeed",
        3,
        2 * 256 // trainer_batch(trainer),
    )
    assert history.rows[1]["val_loss"] < history.rows[0]["val_loss"]


def trainer_batch(trainer: PyTorchDDPTrainer) -> int:
    return trainer.merged.config.global_batch_size or 64


class ReturnsItsLoss(nn.Module):
    """`model_engine(batch)` of the sample is the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0].bfloat16()), batch[1])
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def loop() -> None:
    import deepspeed

    model = ReturnsItsLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's own, at this torch
        deepspeed.init_distributed(dist_backend="gloo")
        found = run("004/zero.py", model=model, train_dataset=DATA, epochs=4, args=types.SimpleNamespace())
    assert found["train_loader"].batch_size == 32 and len(model.losses) == 4 * 4
    assert model.losses[-1] < 0.8 * model.losses[0]
    found["model_engine"].destroy()


CASES = {
    "002/zero_stage.py": lambda: trained(run("002/zero_stage.py", large_model=net())["trainer"]),
    "002/zero_config.py": lambda: trained(run("002/zero_config.py", model=net())["trainer"]),
    "004/zero.py": loop,
}

if __name__ == "__main__":
    run_all(CASES, Path(os.environ["SAMPLES_OUT"]))
