"""Return torch losses whose mean is not over samples as (sum, count).

The weight of a sample then does not depend on how a batch is split.
"""

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
    """Compute cross-entropy or negative log likelihood as (sum, count).

    torch divides the mean by the total weight of the targets that are not ignored; `count` is that weight.
    """

    function: Callable[..., torch.Tensor]
    ignore_index: int = -100
    weight: torch.Tensor | None = None
    label_smoothing: float = 0.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (sum, count) for class indices `targets`.

        Shapes are [batch, classes] for `outputs` and [batch] for `targets`, or both with additional dimensions.
        """
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
        """Return whether averaging the mean loss over samples would weight `targets`, or those of a later batch,
        wrongly."""
        if not isinstance(targets, torch.Tensor) or targets.is_floating_point():
            return False
        return self.weight is not None or targets.dim() > 1 or bool((targets == self.ignore_index).any())


def _by_zeros(weight: torch.Tensor, targets: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the sum of the weights of the `counted` targets, without indexing by a mask.

    On a GPU, indexing with a mask makes the host wait for the length of the result.
    """
    each = weight.index_select(0, torch.where(counted, targets, 0).reshape(-1))
    return (each * counted.reshape(-1)).sum()


def class_loss(loss_fn: Any) -> ClassLoss | None:
    """Return `loss_fn` as a ClassLoss, or None if it is not a class loss of torch.

    Raises ConfigError for a torch loss module with reduction="sum".
    """
    if loss_fn is F.cross_entropy or loss_fn is F.nll_loss:  # `is`, because a user's object may define ==
        return ClassLoss(loss_fn)
    if isinstance(loss_fn, nn.modules.loss._Loss) and loss_fn.reduction == "sum":
        name = type(loss_fn).__name__
        raise ConfigError(
            f"loss_fn={name}(reduction='sum') makes gradients grow with the batch: use {name}(), which averages, or return"
            " a pair (sum, count)"
        )
    if type(loss_fn) not in (nn.CrossEntropyLoss, nn.NLLLoss) or loss_fn.reduction != "mean":
        return None
    function = F.cross_entropy if type(loss_fn) is nn.CrossEntropyLoss else F.nll_loss
    return ClassLoss(function, loss_fn.ignore_index, loss_fn.weight, getattr(loss_fn, "label_smoothing", 0.0))
