"""Metrics that are computed over all samples at once, because the mean of their values over batches is another number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.errors import ConfigError

TRANSFORMS = ("argmax", "softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class OverAll:
    """What `over_all` returns: a function with what it is called with."""

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
    """Return a metric for `Trainer(metrics=...)` that is computed over all samples at once: F1, AUROC, a corpus perplexity.

    Args:
        function: `(outputs, targets)` -> a number or `(sum, count)`. It gets the outputs and targets of all samples of the
            evaluation, each sample once, in the order of the data set: tensors on the CPU (TensorFlow's own tensors where
            that is the engine), joined as `Trainer.predict` joins them. A function of scikit-learn gets NumPy arrays in its
            own order, `(targets, outputs)`.
        transform: what is kept of the outputs of each batch: a function of them, or "argmax", "softmax" or "sigmoid" along
            their last dimension. A class index needs less memory than the scores of all classes.
        training: whether the metric is computed in training too. It covers the epoch so far there.
        arguments: further keyword arguments of `function`, such as `average="macro"`.

    The outputs of the whole data set (in training: of the epoch so far) are kept in host memory: each process keeps its own
    until they are collected, and the main process then holds all of them and computes the value. A warning says when they
    exceed one GiB. For larger outputs pass `transform`, or a metric that keeps sums (a torchmetrics object).
    """
    if not callable(function):
        raise ConfigError(f"over_all({function!r}) got a {type(function).__name__}: pass a function (outputs, targets)")
    if has_state(function):
        raise ConfigError(
            f"over_all({type(function).__name__}) is not needed: an object with update, compute and reset is computed over all"
            " samples by itself"
        )
    if isinstance(transform, str) and transform not in TRANSFORMS:
        raise ConfigError(f"over_all(transform={transform!r}): pass a function, or one of {', '.join(TRANSFORMS)}")
    return OverAll(function, transform, training, arguments)


def has_state(metric: Any) -> bool:
    """Whether `metric` is an object that is updated batch by batch, as those of torchmetrics and Keras."""
    return not isinstance(metric, type) and (is_of_keras(metric) or _has(metric, "update", "compute", "reset"))


def is_of_keras(metric: Any) -> bool:
    """Whether `metric` is an object with the methods of a Keras metric."""
    return not isinstance(metric, type) and _has(metric, "update_state", "result", "reset_state")


def is_of_sklearn(function: Any) -> bool:
    """Whether `function` is one of scikit-learn, which take (targets, outputs) as NumPy arrays."""
    return _home(function).startswith("sklearn.")


def takes_targets_first(function: Any) -> bool:
    """Whether `function` is one of a library whose functions take (targets, outputs)."""
    return _home(function).startswith(("sklearn.", "keras."))


def call_sklearn(metric: OverAll, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The value of a function of scikit-learn for arrays (targets, outputs). ConfigError where it does not take these outputs."""
    try:
        return metric.function(*args, **named, **metric.arguments)
    except ValueError as error:
        if metric.transform is not None:
            raise
        name = getattr(metric.function, "__name__", "function")
        raise ConfigError(
            f"scikit-learn's {name} does not take the model's outputs ({error}): pass over_all({name}, transform='argmax') for"
            " classes, 'softmax' for probabilities, or a function of the outputs"
        ) from error


def _home(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def as_declared(metric: Any) -> Any:
    """A metric as the user means it: a bare function of scikit-learn is one over all samples."""
    return over_all(metric) if not isinstance(metric, OverAll) and is_of_sklearn(metric) else metric


def check_metric(name: str, metric: Any) -> None:
    """ConfigError for what is no metric."""
    if isinstance(metric, OverAll) or has_state(metric):
        return
    if isinstance(metric, type):
        raise ConfigError(f"metrics[{name!r}]={metric.__name__} is a class: pass an object, {metric.__name__}(...)")
    if not callable(metric):
        raise ConfigError(f"metrics[{name!r}]={metric!r} is a {type(metric).__name__}: pass a function")


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
