"""Metrics that are computed over all samples at once, because the mean of their values over batches is a different number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.errors import ConfigError

TRANSFORMS = ("argmax", "softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class OverAll:
    """The result of `over_all`: a function and how to call it.

    Attributes:
        function: the function.
        transform: what to keep of the outputs of each batch, or None for all of them.
        training: whether the metric is computed in training too.
        arguments: further keyword arguments of `function`.
    """

    function: Callable[..., Any]
    transform: Callable[[Any], Any] | str | None = None
    training: bool = True
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def over_all(
    function: Callable[..., Any],
    *,
    transform: Callable[[Any], Any] | str | None = None,
    training: bool = True,
    **arguments: Any,
) -> OverAll:
    """Return a metric for `Trainer(metrics=...)` that is computed over all samples at once, such as F1 or AUROC.

    The outputs of the whole data set (in training: of the epoch so far) are kept in host memory. Each process keeps its own
    outputs until the main process collects them all and computes the value. A warning is shown when the outputs exceed one
    GiB. For larger outputs, pass `transform`, or a metric that keeps sums (a torchmetrics object).

    Args:
        function: `(outputs, targets)` -> a number or `(sum, count)`. It gets the outputs and targets of all samples,
            each once, in the order of the data set. They are CPU tensors (TensorFlow tensors on the `tensorflow`
            backend), joined as `Trainer.predict` joins them. A function of scikit-learn gets NumPy arrays in its own
            order, `(targets, outputs)`.
        transform: what to keep of the outputs of each batch: a function of them, or "argmax", "softmax" or "sigmoid"
            along their last dimension. A class index needs less memory than the scores of all classes.
        training: whether to compute the metric in training too, over the epoch so far.
        arguments: further keyword arguments of `function`, such as `average="macro"`.

    Returns:
        The metric, as an entry of `metrics`.

    Raises:
        ConfigError: `function` is not a function, or `transform` is unknown.
    """
    if not callable(function):
        raise ConfigError(f"over_all({function!r}) got a {type(function).__name__}: pass a function (outputs, targets)")
    if has_state(function):
        raise ConfigError(
            f"over_all({type(function).__name__}) is not needed: an object with update, compute and reset is always computed"
            " over all samples"
        )
    if isinstance(transform, str) and transform not in TRANSFORMS:
        raise ConfigError(f"over_all(transform={transform!r}): pass a function, or one of {', '.join(TRANSFORMS)}")
    return OverAll(function, transform, training, arguments)


def has_state(metric: Any) -> bool:
    """Return whether `metric` is an object that is updated batch by batch, as in torchmetrics and Keras."""
    return not isinstance(metric, type) and (is_of_keras(metric) or _has(metric, "update", "compute", "reset"))


def is_of_keras(metric: Any) -> bool:
    """Return whether `metric` is an object with the methods of a Keras metric."""
    return not isinstance(metric, type) and _has(metric, "update_state", "result", "reset_state")


def is_of_sklearn(function: Any) -> bool:
    """Return whether `function` comes from scikit-learn, whose metrics take (targets, outputs) as NumPy arrays."""
    return _home(function).startswith("sklearn.")


def takes_targets_first(function: Any) -> bool:
    """Return whether `function` comes from a library whose metrics take (targets, outputs)."""
    return _home(function).startswith(("sklearn.", "keras."))


def call_sklearn(metric: OverAll, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return the value of a scikit-learn metric for the arrays `args`, (targets, outputs).

    Raises ConfigError if the function does not accept these outputs and no `transform` is set.
    """
    try:
        return metric.function(*args, **named, **metric.arguments)
    except ValueError as error:
        if metric.transform is not None:
            raise
        name = getattr(metric.function, "__name__", "function")
        raise ConfigError(
            f"scikit-learn's {name} does not accept the model's outputs ({error}): pass over_all({name}, transform='argmax') for"
            " classes, 'softmax' for probabilities, or a function of the outputs"
        ) from error


def _home(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def as_declared(metric: Any) -> Any:
    """Return `metric`, wrapped by `over_all` if it is a plain scikit-learn function."""
    return over_all(metric) if not isinstance(metric, OverAll) and is_of_sklearn(metric) else metric


def check_metric(name: str, metric: Any) -> None:
    """Raise ConfigError if `metric` is not a metric."""
    if isinstance(metric, OverAll) or has_state(metric):
        return
    if isinstance(metric, type):
        raise ConfigError(f"metrics[{name!r}]={metric.__name__} is a class: pass an object, {metric.__name__}(...)")
    if not callable(metric):
        raise ConfigError(f"metrics[{name!r}]={metric!r} is a {type(metric).__name__}: pass a function")


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
