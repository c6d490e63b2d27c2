"""The train.py of 002's launch script: it reads the flags that this gives, and trains with a Trainer."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import TensorDataset

from distributed import PyTorchDDPTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)  # of torch.distributed.launch
parser.add_argument("--num-epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.1)
given = parser.parse_args()

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
trainer = PyTorchDDPTrainer(
    torch.nn.Linear(4, 2), epochs=given.num_epochs, batch_size=given.batch_size, learning_rate=given.lr
)
history = trainer.fit(data)
if trainer.is_main_process:
    print(f"{history.steps} steps of {trainer.plan.world_size} processes")
