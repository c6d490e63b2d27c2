"""Workloads of the benchmarks: the same model, data and initial weights for every contestant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from examples.char_gpt import GPT, next_token_loss


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model to train on synthetic data, always in the same order."""

    name: str
    batch_size: int  # samples per rank
    turn_steps: int  # updates before the next contestant has its turn
    rounds: int
    model: Callable[[], nn.Module]
    data: Callable[[int], TensorDataset]  # number of samples -> data set
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gradient_clipping: float | None = None

    def initial_model(self) -> nn.Module:
        """Return the model, with the same weights every time."""
        torch.manual_seed(0)
        return self.model()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def _mlp_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 32, generator=generator)
    return TensorDataset(inputs, inputs[:, :10].argmax(1))


def _gpt() -> nn.Module:
    return GPT(vocab_size=256, width=128, heads=4, layers=4, length=128)


def _gpt_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (samples, 129), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("mlp", 32, 150, 16, _mlp, _mlp_data, _sgd, F.cross_entropy),
        Workload("gpt", 8, 5, 8, _gpt, _gpt_data, _adamw, next_token_loss, gradient_clipping=1.0),
    )
}
