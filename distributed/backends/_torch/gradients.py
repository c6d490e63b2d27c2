"""The gradients of an update: their norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Gradients:
    """What an update does with the gradients of `parameters` before it uses them.

    All of it works on `views`: dense real tensors that share the gradients' memory. Sparse ones are their values, complex
    ones pairs of real numbers.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], model: torch.nn.Module, device: torch.device) -> None:
        self._parameters = parameters
        has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
        self._are_plain = not has_sparse and not any(p.is_complex() for p in parameters)
        self.device = device  # where the gradients are
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
        self._look(views, self._found)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False

    def non_finite(self, views: list[torch.Tensor]) -> torch.Tensor:
        """A number on the device: 0 when no entry is NaN or infinite. The host does not wait for it."""
        found = torch.zeros_like(self._found)
        if views:
            self._look(views, found)
        return found

    def _look(self, views: list[torch.Tensor], found: torch.Tensor) -> None:
        # The loss scaler's own kernel: no allocation. Multiplying by 1 leaves every bit as it was.
        if self._is_uniform:
            torch._amp_foreach_non_finite_check_and_unscale_(views, found, self._one)
            return
        for kind in {(g.dtype, g.device) for g in views}:
            same = [g for g in views if (g.dtype, g.device) == kind]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, self._one)

    def rescale(self, views: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply in place, each in its own precision."""
        for view in views:
            view.mul_(factor.to(view.device, view.dtype).reshape(()))

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
