"""What the documents' scripts leave undefined: a small model, data and a loss. At the end each process prints its weights."""

from __future__ import annotations

import atexit
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

batch_size, num_epochs = 8, 3
generator = torch.Generator().manual_seed(0)
dataset = torch.randn(32, 4, generator=generator)
targets = torch.tensor(1.0)
_made: list[nn.Module] = []


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", 0)))  # rank 0's weights must become everyone's
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        _made.append(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class YourModel(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        print(f"a model in process {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')}", flush=True)


class YourDataset(TensorDataset):
    def __init__(self) -> None:
        super().__init__(dataset.repeat(4, 1), (dataset.repeat(4, 1).sum(1) > 0).long())


def criterion(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@atexit.register
def tell() -> None:
    for model in _made:
        with torch.no_grad():
            weights = sum(p.double().sum() for p in model.parameters())
            print(f"loss {criterion(model(dataset), targets):.6f} weights {weights:.12f}", flush=True)
