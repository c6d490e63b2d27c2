"""Read the argument `metrics` of a Trainer: metrics by name, or a list of names and objects as in Keras's `compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.errors import ConfigError
from distributed.metrics.monitor import check_names
from distributed.metrics.over_all import OverAll, as_declared, check_metric

_EXAMPLE = 'pass a list, metrics=["accuracy"], or names and functions, metrics={"top1": top1}'


def read_metrics(metrics: Any, *, has_training_step: bool) -> dict[str, Any]:
    """Return the metrics by name.

    The name of an entry in a list is the string itself, the attribute `name` of an object, or the name of a function.

    Raises:
        ConfigError: an entry is not a metric, has no name, or has the name of another one.
    """
    named = dict(metrics) if isinstance(metrics, Mapping) else _of_list(metrics)
    check_names(named)
    for name, metric in named.items():
        if not isinstance(metric, str):
            check_metric(name, metric)
        elif has_training_step:
            raise ConfigError(
                f"metrics[{name!r}]={metric!r} has no outputs to measure with a training_step: let the step return"
                f" {{'loss': loss, {name!r}: value}}, and drop it from metrics"
            )
    return {name: as_declared(metric) for name, metric in named.items()}


def _of_list(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, (list, tuple)):
        raise ConfigError(f"metrics is a {type(metrics).__name__}: {_EXAMPLE}")
    named: dict[str, Any] = {}
    for metric in metrics:
        name = metric if isinstance(metric, str) else _name_of(metric)
        if name is None:
            raise ConfigError(f"metrics has a {type(metric).__name__} without a name: {_EXAMPLE}")
        if name in named:
            raise ConfigError(
                f"metrics has two entries called {name!r}: give them names, metrics={{'one': ..., 'two': ...}}"
            )
        named[name] = metric
    return named


def _name_of(metric: Any) -> str | None:
    function = metric.function if isinstance(metric, OverAll) else metric
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return name if isinstance(name, str) and name != "<lambda>" else None
