"""Compute metrics of torch modules that are given by name, on the scores inside the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from distributed.backends._torch.objective import accuracy, scores
from distributed.errors import ConfigError

_FIX = "or pass a function (outputs, targets), metrics={'mine': mine}"


def named_metric(metric: str, function: Callable[..., Any] | None, loss_fn: Any) -> Callable[..., Any]:
    """Return the function of the metric named `metric`. Called with outputs and targets, it raises ConfigError if they do not fit.

    Args:
        metric: the name.
        function: the function of that name on two tensors. None for the accuracy.
        loss_fn: the loss of the job, which says whether a score is a logit or a probability.
    """
    threshold = _threshold(loss_fn)
    if function is None:
        function = _class_accuracy if threshold is None else functools.partial(_binary_accuracy, threshold)
    compute = function

    def on_scores(outputs: Any, targets: Any) -> Any:
        return compute(_tensor(metric, "outputs", scores(outputs)), _tensor(metric, "targets", targets))

    on_scores.__name__ = metric
    return on_scores


def _tensor(metric: str, what: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    rule = "a tensor or have logits" if what == "outputs" else "a tensor"
    raise ConfigError(f"metrics={metric!r} got {what} of type {type(value).__name__}: let the {what} be {rule}, {_FIX}")


def _threshold(loss_fn: Any) -> float | None:
    """Return the score above which a binary loss means the class 1, or None if `loss_fn` is not a binary loss of torch."""
    if loss_fn is F.binary_cross_entropy_with_logits or isinstance(loss_fn, nn.BCEWithLogitsLoss):
        return 0.0
    return 0.5 if loss_fn is F.binary_cross_entropy or isinstance(loss_fn, nn.BCELoss) else None


def _binary_accuracy(threshold: float, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (number of correct answers, number of answers), as the BinaryAccuracy of Keras counts them."""
    if outputs.shape != targets.shape:
        raise _refused(outputs, targets, "with a binary loss it needs one target for each score: give both one shape")
    return ((outputs > threshold) == targets).sum(), targets.numel()


def _class_accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    is_index = not targets.is_floating_point() and outputs.dim() > 1
    if not is_index or outputs.shape[1] < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        raise _refused(
            outputs,
            targets,
            "it needs scores [batch, classes] and class indices [batch]: pass loss_fn='bce_with_logits' for one logit a sample",
        )
    return accuracy(outputs, targets)


def _refused(outputs: torch.Tensor, targets: torch.Tensor, rule: str) -> ConfigError:
    kind = str(targets.dtype).removeprefix("torch.")
    return ConfigError(
        f"metrics='accuracy' got outputs {list(outputs.shape)} with {kind} targets {list(targets.shape)}, and {rule}, {_FIX}"
    )
