"""The gradients of an update: their norm, whether they are finite, and what to say and do when they are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distributed.backends._torch.averages import without_weight
from distributed.backends._torch.objective import Loss
from distributed.errors import TrainingError
from distributed.state import Group, StepResult


class Gradients:
    """What an update does with the gradients of `parameters` before it uses them.

    All of it works on `views`: dense real tensors that share the gradients' memory. Sparse ones are their values, complex
    ones pairs of real numbers.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], model: torch.nn.Module, device: torch.device) -> None:
        self._parameters = parameters
        has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
        self._are_plain = not has_sparse and not any(p.is_complex() for p in parameters)
        self._found, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._is_uniform = len({(p.dtype, p.device) for p in parameters}) == 1

    def views(self) -> list[torch.Tensor]:
        if self._are_plain:
            return [p.grad for p in self._parameters if p.grad is not None]
        return [_view(p) for p in self._parameters if p.grad is not None]

    def are_finite(self, views: list[torch.Tensor]) -> bool:
        """True when no entry is NaN or infinite. One pass over the gradients and one read by the host."""
        if not views:
            return True
        if self._is_uniform:
            # The loss scaler's own kernel: no allocation. Multiplying by 1 leaves every bit as it was.
            torch._amp_foreach_non_finite_check_and_unscale_(views, self._found, self._one)
        else:
            for kind in {(g.dtype, g.device) for g in views}:
                same = [g for g in views if (g.dtype, g.device) == kind]
                torch._amp_foreach_non_finite_check_and_unscale_(same, self._found, self._one)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False

    def rescale(self, views: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply in place, each in its own precision."""
        for view in views:
            view.mul_(factor.to(view.dtype).reshape(()))

    def clip(self, views: list[torch.Tensor], limit: float) -> torch.Tensor:
        """Shorten the gradient to the norm `limit`; returns its norm before that."""
        if self._are_plain:
            return torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        norm = torch.nn.utils.get_total_norm(views)
        self.rescale(views, (limit / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ does it
        return norm

    def norm(self) -> float | None:
        """The global norm; None where there is no gradient."""
        views = self.views()
        return float(torch.nn.utils.get_total_norm(views)) if views else None


def _view(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient.coalesce()
        gradient = parameter.grad.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


class NanPolicy:
    """`nan_policy`: what happens to an update whose gradients are not finite."""

    def __init__(self, policy: str, report: Callable[[dict[str, Any]], None]) -> None:
        self._policy, self._report = policy, report
        self._last_step, self._in_a_row = -1, 0

    def apply(self, step: int, where: str, result: StepResult, can_be_made: bool) -> None:
        """Stop, or mark the update as left out, or let it be made with a warning."""
        if self._policy == "stop":
            raise TrainingError(
                f"{where}: stopped before the update. Lower learning_rate, set gradient_clipping, or set nan_policy=skip"
            )
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        if self._in_a_row in (1, 10, 100, 1000):
            is_made = self._policy == "warn" and can_be_made
            text = f"{where}: {'update made anyway' if is_made else 'update left out'}"
            self._report({"kind": "warning", "text": text})
        if self._policy == "skip":  # what is reported are means over the updates that were made
            result.skipped, result.averages, result.deferred = True, without_weight(result.averages), []


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
