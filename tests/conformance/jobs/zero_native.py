"""Train with DeepSpeed's own files in each checkpoint, and with an unused layer.

zero_native.py OUT
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, DeepSpeedTrainer, Trainer
from distributed.testing.jobs.cases import freeze
from tests.conformance.jobs import zero

OUT = Path(sys.argv[1])
BASE = {
    "global_batch_size": 12,
    "seed": 1,
    "learning_rate": 1e-2,
    "epochs": 1,
    "checkpoint_every_n_steps": 3,
    "keep_latest_k": 2,
}


class Waits(Callback):
    """Record the timeout of the collectives of DeepSpeed's own group, in seconds."""

    found = None

    def on_step_end(self, state, result):
        group = self.trainer.backend.wrapper.engine.zero.dp_process_group
        Waits.found = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


class Odd(nn.Module):
    """Have shapes that are not divisible by two or three, a frozen layer, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(zero.FEATURES, 7), nn.Linear(7, 7), nn.Linear(7, zero.CLASSES)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.norm(self.first(x)))))


class Unused(nn.Module):
    """Have a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.layer, self.nobody = nn.Linear(zero.FEATURES, zero.CLASSES), nn.Linear(3, 3)
        nn.init.ones_(self.nobody.weight)

    def forward(self, x):
        return self.layer(x)


def native(found):
    for stage in (1, 2, 3):
        for kind in ("no", "bf16"):
            name = f"{stage}-{kind}"
            options = {"zero_stage": stage, "native_checkpoint": True}
            watch = Waits()
            trainer = watch.trainer = Trainer(
                Odd, mixed_precision=kind, deepspeed=options, checkpoint_dir=str(OUT / name), callbacks=[watch], timeout_s=77.0, **BASE
            )  # fmt: skip
            found[name] = trainer.fit(zero.data()).steps
            if len(found) == 1:
                freeze()  # do not collect what the first fit imported
    found["waits"] = Waits.found


def unused(found):
    """Train with a layer without a gradient, with weight decay and without it."""
    for stage in range(4):
        for decay in (0.1, 0.0):
            trainer = Trainer(
                Unused, deepspeed={"zero_stage": stage}, max_steps=2, checkpoint_frequency=None, global_batch_size=12,
                optimizer=lambda params, decay=decay: torch.optim.AdamW(params, lr=0.1, weight_decay=decay),
            )  # fmt: skip
            try:
                trainer.fit(zero.data())
                found[f"unused-{stage}-{decay}"] = trainer.model.nobody.weight.sum().item()
            except ConfigError as error:
                found[f"unused-{stage}-{decay}"] = str(error)


def of_a_document(found):
    """Seed 004's config as it stands, but for fp16, which CPUs do not have, and its DeepSpeed-only loop."""
    config = {
        "train_batch_size": 64, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    }  # fmt: skip
    x = torch.randn(128, zero.FEATURES, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(4)
    trainer = DeepSpeedTrainer(
        zero.net, deepspeed_config=config, epochs=30, checkpoint_frequency=None, loss_fn=nn.functional.cross_entropy,
    )  # fmt: skip
    history = trainer.fit(TensorDataset(x, (x.sum(1) > 0).long()))
    found["document"] = {"steps": history.steps, "loss": [row["loss"] for row in history.rows]}


def main():
    found = {}
    native(found)
    unused(found)
    of_a_document(found)
    (OUT / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


main()
