"""What the drivers of samples without a Trainer share: a model, data of each rank, and checks over all ranks."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch
from torch import nn

from distributed import all_gather, get_rank
from tests.seeds.running import run

criterion = nn.functional.mse_loss
targets = torch.ones(8, 1)


class Net(nn.Module):
    """Alike on all ranks; its first layer is a block that can be computed again."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches(count: int = 4) -> list[torch.Tensor]:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(get_rank())
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def names(**more: Any) -> dict[str, Any]:
    return {"criterion": criterion, "targets": targets, **more}


def vector(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def apart(values: Any) -> float:
    """How far the ranks' tensors are from each other."""
    mine = vector(values)
    return max((each - mine).abs().max().item() for each in all_gather(mine))


def assert_gradients(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """The gradients of `model` are the mean over the ranks of the sums over their `inputs`."""
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    for batch in inputs:
        criterion(plain(batch), targets).backward()
    expected = torch.stack(all_gather(vector(p.grad for p in plain.parameters()))).mean(0)
    assert torch.allclose(vector(p.grad for p in model.parameters()), expected, atol=1e-6)


def printed(sample: str, **more: Any) -> tuple[str, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        left = run(sample, **more)
    return text.getvalue(), left
