"""The samples of guides that make a trainer, with a model and loaders of handwritten digits filled in. Prints one line of facts."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, Subset

from distributed import PyTorchDDPTrainer
from examples.train import digits

OUT = Path(sys.argv[1])
TRAIN, HELD_OUT = digits()
FEW = Subset(TRAIN, range(320))
train_loader, val_loader = DataLoader(TRAIN, batch_size=32, shuffle=True), DataLoader(HELD_OUT, batch_size=256)


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def made(**settings: object) -> PyTorchDDPTrainer:
    """On CPUs: `num_gpus=8` is an error here, and `nproc_per_node` is the launcher's."""
    torch.manual_seed(0)
    return PyTorchDDPTrainer(model=MyModel(), **settings)


def learning_rates(history: object) -> list[float]:
    return [row["learning_rate"] for row in history.rows]


def a_trainer() -> dict[str, object]:
    trainer = made(batch_size=32, epochs=4, learning_rate=0.01, mixed_precision=True)
    history = trainer.fit(train_loader, val_loader, checkpoint_dir=str(OUT / "checkpoints"))
    saved = [path.name for path in (OUT / "checkpoints").glob("step-*")]
    return {"accuracy": history.best_accuracy, "time": history.total_time, "saved": saved, "steps": history.steps}


def fp16_and_its_scaler() -> dict[str, object]:
    trainer = made(mixed_precision="fp16", scaler_init_scale=2**16, scaler_growth_interval=2000, epochs=2)
    history = trainer.fit(DataLoader(FEW, batch_size=16))
    return {"losses": [row["loss"] for row in history.rows], "scale": trainer.backend.precision.state()["scale"]}


def accumulation() -> dict[str, object]:
    """Eight times the batch of each process: 8 x 8 x the processes, whatever a comment beside it says."""
    history = made(batch_size=8, gradient_accumulation_steps=8, epochs=1).fit(TRAIN)
    return {"steps": history.steps}


def scaled_rates() -> dict[str, object]:
    """Not by hand, by a number of GPUs that may be another one: by the batch that runs."""
    return {
        rule: learning_rates(made(batch_size=16, learning_rate=0.01, lr_scaling=rule, epochs=1).fit(FEW))
        for rule in ("none", "linear", "sqrt")
    }


def warm_up() -> dict[str, object]:
    """A function of the optimizer, which the trainer makes; `milestones` count epochs here."""

    def schedule(optimizer: torch.optim.Optimizer) -> SequentialLR:
        warmup = LinearLR(optimizer, start_factor=0.1, total_iters=2)
        main = CosineAnnealingLR(optimizer, T_max=3)
        return SequentialLR(optimizer, schedulers=[warmup, main], milestones=[2])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR calls its parts in a way that they warn of
        trainer = made(scheduler=schedule, scheduler_interval="epoch", learning_rate=0.01, epochs=5)
        return {"rates": learning_rates(trainer.fit(DataLoader(FEW, batch_size=32)))}


def fault_tolerance() -> dict[str, object]:
    def run(epochs: int, resume: bool) -> int:
        settings = {"checkpoint_frequency": 1, "checkpoint_dir": str(OUT / "resumed"), "resume_from_checkpoint": resume}
        return made(epochs=epochs, **settings).fit(DataLoader(FEW, batch_size=16)).steps

    return {"steps": [run(1, False), run(3, True)]}


def a_sampler_in_the_loader() -> dict[str, object]:
    """It gives way to the order of the trainer, so that no sample is seen twice or left out."""
    losses = []
    for sampler in (None, DistributedSampler(FEW, num_replicas=2, rank=0, shuffle=False)):
        history = made(epochs=2, shuffle=False).fit(DataLoader(FEW, batch_size=16, sampler=sampler))
        losses.append([row["loss"] for row in history.rows])
    return {"losses": losses, "steps": history.steps}


def profiling() -> dict[str, object]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as prof:
        history = made(epochs=1).fit(train_loader, max_steps=5)
    names = {event.key for event in prof.key_averages()}
    return {"steps": history.steps, "has_backward": any("AddmmBackward" in name for name in names)}


def tensorboard() -> dict[str, object]:
    made(epochs=1, tensorboard_dir=OUT / "boards", log_every_n_steps=10).fit(train_loader, val_loader, max_steps=20)
    return {"directory": str((OUT / "boards").resolve())}


CASES = (
    a_trainer, fp16_and_its_scaler, accumulation, scaled_rates, warm_up, fault_tolerance, a_sampler_in_the_loader, profiling,
    tensorboard,
)  # fmt: skip
found = {case.__name__: case() for case in CASES}
if made().is_main_process:
    print(json.dumps(found), flush=True)
