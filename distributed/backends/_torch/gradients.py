"""Compute the norm of an update's gradients, clip them and detect non-finite values."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Gradients:
    """Examine and change the gradients of `parameters` before the update.

    All methods work on `views`: dense real tensors that share memory with the gradients. The view of a sparse
    gradient is its values, and the view of a complex gradient is pairs of real numbers.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], model: torch.nn.Module, device: torch.device) -> None:
        self._parameters = parameters
        has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
        self._are_plain = not has_sparse and not any(p.is_complex() for p in parameters)
        self.device = device  # the device of the gradients
        self._found, self._one = torch.zeros(1, device=device), torch.ones(1, device=device)
        self._is_uniform = len({(p.dtype, p.device) for p in parameters}) == 1

    def views(self) -> list[torch.Tensor]:
        if self._are_plain:
            return [p.grad for p in self._parameters if p.grad is not None]
        return [_view(p) for p in self._parameters if p.grad is not None]

    def are_finite(self, views: list[torch.Tensor]) -> bool:
        """Return whether no entry is NaN or infinite.

        This takes one pass over the gradients and one read by the host.
        """
        if not views:
            return True
        self._look(views, self._found)
        if self._found.item() == 0.0:
            return True
        self._found.zero_()
        return False

    def non_finite(self, views: list[torch.Tensor]) -> torch.Tensor:
        """Return a number on the device that is 0 if no entry is NaN or infinite. The host does not wait for it."""
        found = torch.zeros_like(self._found)
        if views:
            self._look(views, found)
        return found

    def _look(self, views: list[torch.Tensor], found: torch.Tensor) -> None:
        # The kernel of the loss scaler allocates nothing. Multiplying by 1 changes no bit.
        if self._is_uniform:
            torch._amp_foreach_non_finite_check_and_unscale_(views, found, self._one)
            return
        for kind in {(g.dtype, g.device) for g in views}:
            same = [g for g in views if (g.dtype, g.device) == kind]
            torch._amp_foreach_non_finite_check_and_unscale_(same, found, self._one)

    def rescale(self, views: list[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply the gradients in place, each in its own element type."""
        for view in views:
            view.mul_(factor.to(view.device, view.dtype).reshape(()))

    def clip(self, views: list[torch.Tensor], limit: float) -> torch.Tensor:
        """Clip the gradient to the norm `limit` in place and return its norm before clipping."""
        if self._are_plain:
            return torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        norm = torch.nn.utils.get_total_norm(views)
        self.rescale(views, (limit / (norm + 1e-6)).clamp(max=1.0))  # the formula of clip_grad_norm_
        return norm

    def norm(self) -> float | None:
        """Return the global norm, or None if there is no gradient."""
        views = self.views()
        return float(torch.nn.utils.get_total_norm(views)) if views else None


def _view(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        parameter.grad = gradient.coalesce()
        gradient = parameter.grad.values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
