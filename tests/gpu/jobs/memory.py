"""Two workers under pytorch-ddp. The second one asks for more memory than there is."""

from __future__ import annotations

import os

import torch
from gpu_support import DEVICE, TOO_MUCH, Net, data
from torch.nn.functional import cross_entropy

from distributed import Trainer

calls = []


def step(model, batch):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=DEVICE)
    return cross_entropy(model(batch[0]), batch[1])


Trainer(Net(), training_step=step).fit(data())
