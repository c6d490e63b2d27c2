"""DeepSpeed as guides show it: `deepspeed.initialize` in a loop of one's own, and through a trainer by `deepspeed_config` and
`zero_stage`. On handwritten digits. Prints one line of facts."""

from __future__ import annotations

import json
import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader

from distributed import PyTorchDDPTrainer
from examples.train import digits

TRAIN, HELD_OUT = digits()


class Classifier(nn.Module):
    """Returns its loss where it gets targets: `model_engine(batch)` of the guide does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        outputs = self.layers(images)
        return outputs if targets is None else nn.functional.cross_entropy(outputs, targets)


def own_loop() -> dict[str, object]:
    """On CPUs there is no fp16 and nothing to pin; torch's AdamW needs no compiler; the config says the batch of all processes."""
    torch.manual_seed(0)
    model = Classifier()
    config = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}},
        "steps_per_print": 1 << 60,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed's own, at this torch
        deepspeed.init_distributed(dist_backend="gloo")
        engine, _, loader, _ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), training_data=TRAIN, config=config
        )
        losses = []
        for _ in range(2):
            for images, targets in loader:
                loss = engine(images.bfloat16(), targets)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    engine.destroy()
    return {"batch": loader.batch_size, "first": losses[0], "last": losses[-1]}


def by_config() -> dict[str, object]:
    """`DeepSpeedConfig` takes a dict and no keyword arguments; with it our trainer runs on DeepSpeed."""
    config = deepspeed.DeepSpeedConfig({
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    })  # fmt: skip
    trainer = PyTorchDDPTrainer(model=Classifier(), deepspeed_config=config, epochs=3, learning_rate=1e-2)
    return trained(trainer)


def by_stage() -> dict[str, object]:
    return trained(PyTorchDDPTrainer(model=Classifier(), zero_stage=3, batch_size=32, epochs=3, learning_rate=1e-2))


def trained(trainer: PyTorchDDPTrainer) -> dict[str, object]:
    history = trainer.fit(DataLoader(TRAIN, shuffle=True), HELD_OUT)
    return {
        "backend": trainer.plan.backend, "stage": trainer.backend.stage, "accuracy": history.best_accuracy, "steps": history.steps,
    }  # fmt: skip


found = {"by_stage": by_stage(), "by_config": by_config(), "own_loop": own_loop()}
if int(os.environ["RANK"]) == 0:
    print(json.dumps(found), flush=True)
