"""Train on a device whose memory holds a number of samples: `LARGEST`, on rank 1 from step 3 on."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer

RANK, KIND, LARGEST = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2])
ERRORS: dict[str, Any] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 80.00 GiB."),
    "host": lambda: MemoryError("Unable to allocate 2.00 GiB"),
}
STEPS = [0]  # number of updates that this process has begun at


class Counts(Callback):
    def on_train_start(self, state: Any) -> None:
        STEPS[0] = state.step

    def on_step_end(self, state: Any, result: Any) -> None:
        STEPS[0] = state.step


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(x)
        if int(os.environ["WORLD_SIZE"]) == RANK + 1 and STEPS[0] >= 2 and len(x) > LARGEST:
            outputs.register_hook(lambda gradient: fail())  # in the backward pass
        return outputs


def fail() -> None:
    raise ERRORS[KIND]()


generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 6, generator=generator, dtype=torch.float64)
y = torch.randint(0, 3, (96,), generator=generator)
Trainer(Net, loss_fn=torch.nn.CrossEntropyLoss(), callbacks=[Counts()], dtype="float64", learning_rate=0.01).fit(
    TensorDataset(x, y)
)
