"""Train the adapters of a frozen model and leave the frozen parameters out of the checkpoints.

    adapters.py OUT NAME UPDATES DTYPE CHECKPOINT|-

NAME.safetensors has all weights at the end, NAME-RANK.json what a rank saw. One process that resumes also trains without
interruption, into whole.safetensors.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import CheckpointError, Trainer

OUT, NAME, UPDATES, DTYPE, CHECKPOINT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.norm = nn.Linear(12, 64), nn.LayerNorm(64)
        self.down, self.up = nn.Linear(64, 3), nn.Linear(3, 64)
        self.head = nn.Linear(64, 4)
        self.register_buffer("scale", torch.full((64,), 0.5))
        for frozen in (self.base, self.norm):
            frozen.requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.norm(self.base(x)))
        return self.head(x + self.scale * self.up(self.down(x)))


def net(change=None):
    model = Adapted()
    if change is not None:
        model.get_parameter(change).data.view(-1)[-1] += 1  # on each rank with values
    return model


def trainer(make, checkpoint, updates):
    return Trainer(
        make,
        dtype=DTYPE,
        optimizer="adamw",
        learning_rate=1e-2,
        global_batch_size=8,
        epochs=4,
        max_steps=updates,
        checkpoint_every_n_steps=updates,
        checkpoint_frequency=None,
        checkpoint_trainable_only=True,
        resume_from_checkpoint=checkpoint,
        verbose=False,
    )


generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(40, 12, generator=generator), torch.randint(0, 4, (40,), generator=generator))
seen = {"refused": ""}
if CHECKPOINT != "-":
    try:
        trainer(lambda: net("norm.bias"), CHECKPOINT, UPDATES).fit(data)
    except CheckpointError as error:
        seen["refused"] = str(error)
trained = trainer(net, False if CHECKPOINT == "-" else CHECKPOINT, UPDATES)
run = trained.fit(data)
seen |= {"run_dir": str(Path(run.run_dir).absolute()), "steps": run.steps}
trained.save(OUT / f"{NAME}.safetensors")
(OUT / f"{NAME}-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
if CHECKPOINT != "-" and os.environ.get("WORLD_SIZE", "1") == "1":
    whole = trainer(net, False, UPDATES)
    whole.fit(data)
    whole.save(OUT / "whole.safetensors")
