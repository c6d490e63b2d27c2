"""Find the losses and metrics of torch modules by name. Loads torch at the first use of a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from distributed.backends._keras import by_name
from distributed.backends.keras_kinds import is_model
from distributed.errors import ConfigError, nearest
from distributed.state import Job

# name -> function of torch.nn.functional
LOSSES = {
    "cross_entropy": "cross_entropy",
    "mse": "mse_loss",
    "l1": "l1_loss",
    "bce_with_logits": "binary_cross_entropy_with_logits",
}
_ACCURACY = "accuracy"  # of class scores `[batch, classes]`, or of single scores with a binary loss
_LOSS_FIX = "or pass a function (outputs, targets), such as torch.nn.functional.huber_loss"
_METRIC_FIX = "or pass names and functions, metrics={'top1': top1}"


def resolved(job: Job) -> Job:
    """Return the job with functions in the place of names. Raises ConfigError for an unknown name."""
    if not isinstance(job.loss_fn, str) and not any(isinstance(metric, str) for metric in job.metrics.values()):
        return job
    _check(job)
    loss_fn = _function(job.loss_fn)
    metrics = {name: _metric(metric, loss_fn) for name, metric in job.metrics.items()}
    return dataclasses.replace(job, loss_fn=loss_fn, metrics=metrics)


def check_names_early(job: Job) -> None:
    """Raise ConfigError for an unknown name, if the kind of the model is known. A factory may return either kind."""
    if is_model(job.model):
        by_name.check_names(job)
    elif hasattr(job.model, "parameters"):
        _check(job)


def weights_refused() -> ConfigError:
    """Return the error for sample weights of a torch module."""
    return ConfigError(
        "sample_weight and class_weight weigh the loss of a Keras model, and this model is a torch module: pass"
        " loss_fn=torch.nn.CrossEntropyLoss(weight=...), or let the data set yield the weights to a training_step"
    )


def _check(job: Job) -> None:
    if isinstance(job.loss_fn, str):
        _check_name("loss_fn", job.loss_fn, list(LOSSES), _LOSS_FIX)
    for name, metric in job.metrics.items():
        if isinstance(metric, str):
            _check_name(f"metrics[{name!r}]", metric, [_ACCURACY, *LOSSES], _METRIC_FIX)


def _check_name(argument: str, name: str, known: list[str], fix: str) -> None:
    if name not in known:
        raise ConfigError(
            f"{argument}={name!r} is not a name for torch modules{nearest(name, known)}: choose one of {', '.join(known)}, {fix}"
        )


def _function(value: Any) -> Callable[..., Any] | Any:
    if not isinstance(value, str):
        return value
    import torch.nn.functional as F

    return getattr(F, LOSSES[value])


def _metric(value: Any, loss_fn: Any) -> Any:
    if not isinstance(value, str):
        return value
    from distributed.backends._torch.named_metrics import named_metric

    return named_metric(value, None if value == _ACCURACY else _function(value), loss_fn)
