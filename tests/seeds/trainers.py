"""The samples of 002 that make a PyTorchDDPTrainer, on two processes of one launch and handwritten digits."""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import distributed
from distributed import DistributedConfig, PyTorchDDPTrainer, Trainer
from examples.train import digits
from tests import event_files
from tests.seeds.running import run, run_all

TRAIN, HELD_OUT = digits()
FEW = Subset(TRAIN, range(320))
train_loader, val_loader = DataLoader(TRAIN, batch_size=32, shuffle=True), DataLoader(HELD_OUT, batch_size=256)
few_loader = DataLoader(FEW, batch_size=16)


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def learning_rates(history: distributed.History) -> list[float]:
    return [row["learning_rate"] for row in history.rows]


def python_api() -> None:
    trainer = run("002/python_api.py", MyModel=MyModel, train_loader=train_loader, val_loader=val_loader)["trainer"]
    assert len(trainer.history.rows) == 2 and trainer.best_accuracy > 0.5


def ddp() -> None:
    flat = [DataLoader(Flat(data), batch_size=32) for data in (TRAIN, HELD_OUT)]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        found = run("002/ddp.py", train_loader=flat[0], val_loader=flat[1])
    history = found["history"]
    assert history.best_accuracy > 0.85
    assert f"Training time: {history.total_time:.2f}s\nFinal accuracy: {history.best_accuracy:.4f}\n" in text.getvalue()
    assert history.steps == 4 * math.ceil(1437 / 64)
    assert list(Path("checkpoints").rglob(f"step-{history.steps:08d}"))


class Flat(torch.utils.data.Dataset):
    """Images as vectors, which the sample's own model takes."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, label = self.data[index]
        return image.reshape(-1), label


def config() -> None:
    made = run("002/config.py")["config"]
    assert isinstance(made, DistributedConfig)
    values = (made.num_gpus, made.num_nodes, made.backend, made.gradient_clipping, made.communication_backend)
    assert values == (8, 2, "pytorch-ddp", 1.0, "nccl") and made.ddp == {"find_unused_parameters": False}


def mixed_precision() -> None:
    trainer = run("002/mixed_precision.py", model=MyModel())["trainer"]
    assert trainer.fit(few_loader).steps == 10
    assert trainer.merged.config.scaler_init_scale == 2**16
    fp16 = {
        "mixed_precision": "fp16",
        "scaler_init_scale": 2**16,
        "scaler_growth_interval": 2000,
    }  # on CPUs True is bf16
    trainer = PyTorchDDPTrainer(MyModel(), **fp16, epochs=2)
    losses = [row["loss"] for row in trainer.fit(few_loader).rows]
    assert losses[1] < losses[0] and trainer.backend.precision.state()["scale"] == 2**16


def accumulation(sample: str) -> None:
    """Eight times the batch of each process: 8 x 8 x the processes, whatever a comment beside it says."""
    trainer = run(sample, model=MyModel())["trainer"]
    assert trainer.fit(TRAIN).steps == math.ceil(1437 / (8 * 8 * 2))


def experiment() -> None:
    trainer = run("002/experiment.py", model=MyModel(), train_loader=few_loader, val_loader=val_loader)["trainer"]
    assert trainer.history.steps == 10 and trainer.best_accuracy > 0


def tensorboard() -> None:
    trainer = run("002/tensorboard.py", model=MyModel())["trainer"]
    trainer.fit(train_loader, val_loader, max_steps=20)
    if trainer.is_main_process:
        (directory,) = Path("runs").iterdir()
        board = event_files.read(directory)
        assert event_files.steps(board, "train/loss") == [10, 20]
        assert {"val/loss", "val/accuracy", "train/learning_rate", "train/grad_norm"} <= set(board.Tags()["scalars"])


def profiling() -> None:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as text:
        warnings.simplefilter("ignore")  # of the profiler: no GPU
        trainer = PyTorchDDPTrainer(MyModel())
        run("002/profiling.py", trainer=trainer, train_loader=train_loader, val_loader=val_loader)
    assert trainer.history.steps == 5 and "AddmmBackward" in text.getvalue()


def rate_scaling() -> None:
    """By hand, and by the rule that says the same for the batch that runs."""
    by_hand = run("002/rate_scaling.py", model=MyModel())["trainer"].fit(few_loader)
    by_rule = {
        rule: PyTorchDDPTrainer(MyModel(), learning_rate=0.001, lr_scaling=rule).fit(few_loader)
        for rule in ("sqrt", "linear", "none")
    }
    rates = {rule: learning_rates(history)[0] for rule, history in by_rule.items()}
    assert learning_rates(by_hand)[0] == pytest.approx(rates["sqrt"]) == pytest.approx(0.001 * math.sqrt(2))
    assert (rates["linear"], rates["none"]) == pytest.approx((0.002, 0.001))


def warmup() -> None:
    """Its milestones count epochs."""
    model = MyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts in a way that they warn of
        scheduler = run("002/warmup.py", optimizer=optimizer)["scheduler"]
        trainer = Trainer(model, optimizer=optimizer, scheduler=scheduler, scheduler_interval="epoch", epochs=5)
        rates = learning_rates(trainer.fit(few_loader))
    cosine = [0.01 * (1 + math.cos(math.pi * epoch / 3)) / 2 for epoch in range(3)]
    assert rates == pytest.approx([0.001, 0.0055, *cosine])


def data_loading() -> None:
    """The sampler gives way to the order of the trainer, so that no sample is seen twice or left out."""
    given = {"num_gpus": 2, "rank": distributed.get_rank(), "batch_size": 16, "dataset": FEW}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pin_memory, without a GPU
        loader = run("002/data_loading.py", **given)["train_loader"]
        found = PyTorchDDPTrainer(MyModel(), epochs=2, shuffle=False).fit(loader)
    plain = PyTorchDDPTrainer(MyModel(), epochs=2, shuffle=False).fit(few_loader)
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in plain.rows]
    assert found.steps == 2 * 320 / 32


CASES = {
    "002/python_api.py": python_api,
    "002/ddp.py": ddp,
    "002/config.py": config,
    "002/mixed_precision.py": mixed_precision,
    "002/accumulation.py": lambda: accumulation("002/accumulation.py"),
    "002/accumulation_for_memory.py": lambda: accumulation("002/accumulation_for_memory.py"),
    "002/experiment.py": experiment,
    "002/tensorboard.py": tensorboard,
    "002/profiling.py": profiling,
    "002/rate_scaling.py": rate_scaling,
    "002/warmup.py": warmup,
    "002/data_loading.py": data_loading,
}

if __name__ == "__main__":
    run_all(CASES, Path(os.environ["SAMPLES_OUT"]))
