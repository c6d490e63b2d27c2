"""Losses of torch whose mean is not over samples: as (sum, count), so that they weigh alike however a batch is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distributed.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy or negative log likelihood, which torch divides by the weights of the targets that are not ignored."""

    function: Callable[..., torch.Tensor]
    ignore_index: int = -100
    weight: torch.Tensor | None = None
    label_smoothing: float = 0.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum, count) over class indices `targets`: [batch] for `outputs` [batch, classes], or with more dimensions."""
        more = {"label_smoothing": self.label_smoothing} if self.function is F.cross_entropy else {}
        total = self.function(
            outputs, targets, weight=self.weight, ignore_index=self.ignore_index, reduction="sum", **more
        )
        return total, self._count(targets)

    def _count(self, targets: torch.Tensor) -> torch.Tensor:
        counted = targets != self.ignore_index
        if self.weight is None:
            return counted.sum()
        return _by_zeros(self.weight, targets, counted) if targets.is_cuda else self.weight[targets[counted]].sum()

    def needs_count(self, targets: Any) -> bool:
        """Whether a mean over samples would weigh `targets` wrongly, or might in a later batch."""
        if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
            return False
        return self.weight is not None or targets.dim() > 1 or bool((targets == self.ignore_index).any())


def _by_zeros(weight: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """The weights of the `counted` targets, summed up. On a GPU a mask as index makes the host wait for its length."""
    each = weight.index_select(0, torch.where(counted, targets, 0).reshape(-1))
    return (each * counted.reshape(-1)).sum()


def class_loss(loss_fn: Any) -> ClassLoss | None:
    """`loss_fn` as a ClassLoss if it is one of torch's. ConfigError for a module of torch that sums."""
    if loss_fn is F.cross_entropy or loss_fn is F.nll_loss:  # == of an object of the user's may be anything
        return ClassLoss(loss_fn)
    if isinstance(loss_fn, nn.modules.loss._Loss) and loss_fn.reduction == "sum":
        name = type(loss_fn).__name__
        raise ConfigError(
            f"loss_fn={name}(reduction='sum') makes gradients grow with the batch: use {name}(), the mean, or return"
            " a pair (sum, count)"
        )
    if type(loss_fn) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss_fn.reduction != "mean":
        return None
    function = F.cross_entropy if type(loss_fn) is nn.CrossEntropyLoss else F.nll_loss
    return ClassLoss(function, loss_fn.ignore_index, loss_fn.weight, getattr(loss_fn, "label_smoothing", 0.0))
