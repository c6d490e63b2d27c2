"""Norm, clipping and the check for NaN see complex and sparse gradients too; a fork touches no other device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distributed.backends._torch import generators
from distributed.backends._torch.gradients import Gradients


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = {
        "real": lambda: nn.Linear(3, 2),
        "complex": lambda: nn.Linear(3, 2, dtype=torch.complex64),
        "sparse": lambda: nn.EmbeddingBag(4, 2, mode="sum", sparse=True),
        "two types": lambda: nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2, dtype=torch.complex128)]),
    }
    return layers[kind]()


def backward(module: nn.Module, scale: float = 1.0) -> None:
    for part in module if isinstance(module, nn.ModuleList) else [module]:
        weight = next(part.parameters())
        x = torch.tensor([[1, 1, 2]]) if isinstance(part, nn.EmbeddingBag) else torch.ones(1, 3, dtype=weight.dtype)
        part(x).abs().sum().mul(scale).backward()


def dense(module: nn.Module) -> torch.Tensor:
    """The gradient by hand, as one complex vector."""
    found = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in module.parameters()]
    return torch.cat([g.flatten().to(torch.complex128) for g in found])


@pytest.mark.parametrize("kind", ["real", "complex", "sparse", "two types"])
def test_gradients_of_any_kind_are_measured_clipped_rescaled_and_checked(kind: str) -> None:
    module = model(kind)
    backward(module)
    gradients = Gradients(list(module.parameters()), module, torch.device("cpu"))
    whole = dense(module)
    assert gradients.norm() == pytest.approx(float(whole.norm()))
    gradients.rescale(gradients.views(), torch.tensor(2.0))
    assert torch.allclose(dense(module), 2 * whole)
    limit = float(whole.norm()) / 2
    assert float(gradients.clip(gradients.views(), limit)) == pytest.approx(float(2 * whole.norm()))
    assert torch.allclose(dense(module), whole / 2)
    assert gradients.are_finite(gradients.views())
    backward(module, scale=float("nan"))
    assert not gradients.are_finite(gradients.views())
    assert not gradients.are_finite(gradients.views())  # the check itself is as it was


def test_a_fork_saves_the_generators_of_this_ranks_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: asked.append(list(devices)))
    generators.forked(torch.device("cpu"))
    generators.forked(torch.device("cuda:1"))
    assert asked == [[], [torch.device("cuda:1")]]
