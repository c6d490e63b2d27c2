"""Train twice with the same numbers, and save at once and in the background: `async_saves.py OUT BACKEND`."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from distributed import Trainer
from tests.conformance.jobs import zero

OUT, BACKEND = Path(sys.argv[1]), sys.argv[2]
OPTIONS = zero.STAGES if BACKEND == "deepspeed" else {BACKEND: {}}


class Counting(torch.nn.Tanh):
    """Has a buffer that each batch changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_batches", torch.zeros(2))

    def forward(self, inputs):
        self.num_batches += 1
        return super().forward(inputs)


def model():
    """Return a model with shapes that are not divisible by two or three."""
    return torch.nn.Sequential(torch.nn.Linear(zero.FEATURES, 7), Counting(), torch.nn.Linear(7, zero.CLASSES))


for name, options in OPTIONS.items():
    for is_async in (False, True):
        trainer = Trainer(
            model, global_batch_size=12, epochs=1, seed=1, learning_rate=1e-2, checkpoint_every_n_steps=2, keep_latest_k=50,
            checkpoint_async=is_async, checkpoint_dir=OUT / name / ("async" if is_async else "at-once"),
            **({"deepspeed": options} if BACKEND == "deepspeed" else {}),
        )  # fmt: skip
        trainer.fit(DataLoader(zero.data(), shuffle=True))
