"""Whether gradients are finite, and what to say when they are not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from distributed.backends._torch.objective import Loss
from distributed.state import Group


class FiniteCheck:
    """`check(gradients)`: True when no entry is NaN or infinite. One pass over the gradients and one read by the host."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], model: torch.nn.Module, device: torch.device) -> None:
        self._found, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._is_uniform = len({(p.dtype, p.device) for p in parameters}) == 1
        self._has_sparse = any(getattr(module, "sparse", False) for module in model.modules())

    def __call__(self, gradients: list[torch.Tensor]) -> bool:
        if not gradients:
            return True
        if self._has_sparse:
            return all(bool((g._values() if g.is_sparse else g).isfinite().all()) for g in gradients)
        if self._is_uniform:
            # The loss scaler's own kernel: no allocation. Multiplying by 1 leaves every bit as it was.
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._found, self._one)
        else:
            for kind in {(g.dtype, g.device) for g in gradients}:
                same = [g for g in gradients if (g.dtype, g.device) == kind]
                torch._amp_foreach_non_finite_check_and_unscale_(same, self._found, self._one)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False


def rescale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply in place, each in its own precision."""
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype).reshape(()))


_BAD = ("nan", "inf", "-inf")  # how `vote` numbers them, from 1 on


def vote(losses: Sequence[Loss]) -> float:
    """0 where all losses are finite, else the number of the first one that is not: what a rank tells the others."""
    values = (float(loss.value.detach()) for loss in losses)
    bad = next((value for value in values if not math.isfinite(value)), None)
    return 0.0 if bad is None else 1.0 + _BAD.index(str(bad))


def describe(step: int, group: Group, votes: Mapping[int, float]) -> str:
    """Where and what: the step, the ranks (by their votes) whose loss it was, and the samples of the update."""
    bad = {rank: _BAD[int(number) - 1] for rank, number in votes.items() if number}
    if bad:
        here = f"the loss is {next(iter(bad.values()))} on rank {', '.join(map(str, bad))}"
    else:
        here = "a gradient is NaN or infinite"
    last = group.position + group.num_samples - 1
    return f"step {step}: {here} (samples at positions {group.position} to {last} of the epoch)"
