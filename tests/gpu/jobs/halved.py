"""One worker whose micro-batches of more than 8 samples need more memory than there is."""

from __future__ import annotations

import torch
from gpu_support import DEVICE, TOO_MUCH, Net, data, sgd
from torch.nn.functional import cross_entropy

from distributed import Trainer


def step(model, batch):
    if len(batch[0]) > 8:
        torch.empty(TOO_MUCH, dtype=torch.uint8, device=DEVICE)
    return cross_entropy(model(batch[0]), batch[1])


ours = Trainer(Net(), training_step=step, optimizer=sgd)
ours.fit(data())
ours.save("weights.safetensors")
