"""Compute Keras metrics that are not means over samples, on any engine. Their variables are sums over batches, which
are added over ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from distributed.backends._keras.losses import compute_in_floatx
from distributed.backends.over_all import Measure, MetricEngine, OutputsMeasure, Update, driven
from distributed.backends.parts import Arguments, Part
from distributed.metrics.of_keras import is_from_keras

OBJECT = ("reset_state", "update_state", "result")  # names of the methods of a Keras metric
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def is_mean(metric: Any) -> bool:
    """Return True if the metric is a sum over samples divided by their number or weight."""
    import keras

    return isinstance(metric, keras.metrics.Mean) and type(metric).result is keras.metrics.Mean.result


def measure_of(metric: Any, engine: MetricEngine, scope: Scope, prepare: Callable[[Arguments], Arguments]) -> Measure:
    """Return the Measure that computes a Keras metric over all samples.

    The variables of Keras's own metrics are sums, so the metric is computed from the sums over all ranks. The variables
    of a user's metric may be anything, so the metric is computed from all outputs.

    Args:
        prepare: converts the arguments of a call, (outputs, targets), to the form in which the host keeps them.
    """
    if is_from_keras(type(metric)):
        return SumsMeasure(metric, scope)

    def drive(updates: Sequence[Update]) -> Any:
        with scope():
            return _number(driven(metric, updates, engine, OBJECT))

    return OutputsMeasure(drive, lambda call: prepare(in_order_of_keras(call)))


def in_order_of_keras(call: Arguments) -> Arguments:
    """Return the arguments with (outputs, targets) swapped to (targets, outputs)."""
    outputs, targets, *more = call.args or (None, None)
    return call._replace(args=(targets, outputs, *more)) if call.args else call


class SumsMeasure:
    """Compute a metric from float64 sums of the values that each batch adds to its variables."""

    training = True

    def __init__(self, metric: Any, scope: Scope) -> None:
        self._original, self._scope = metric, scope
        self._sums: list[Any] | None = None

    @functools.cached_property
    def _metric(self) -> Any:
        """Copy of the metric. Made at its first use, because the metrics of `compile` are found while a graph is
        traced."""
        return _copy(self._original)

    def absorb(self, part: Part) -> None:
        """Add one batch."""
        args, named = in_order_of_keras(part.value)
        with self._scope():
            self._metric.reset_state()
            self._metric.update_state(*args, **named)
            added = [_array(variable.value).astype(numpy.float64) for variable in self._metric.variables]
        self._sums = added if self._sums is None else [a + b for a, b in zip(self._sums, added, strict=True)]

    def take(self) -> list[Part]:
        """Return nothing, because no outputs are kept."""
        return []

    def state(self) -> list[Any] | None:
        """Return the sums."""
        return None if self._sums is None else list(self._sums)

    def restore(self, states: Sequence[Any]) -> None:
        """Set the sums to the total of `states`, the sums of one or several ranks."""
        self._sums = _added(states) if states else None

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> Any:
        """Return the metric computed from the sums of all ranks."""
        with self._scope():
            self._metric.reset_state()
            for variable, total in zip(self._metric.variables, _added(states), strict=True):
                variable.assign(total.astype(variable.dtype))
            return _number(self._metric.result())

    def reset(self) -> None:
        """Drop the sums."""
        self._sums = None


def _added(states: Sequence[Any]) -> list[Any]:
    return [sum(_array(each) for each in values) for values in zip(*states, strict=True)]


def _array(value: Any) -> Any:
    import keras

    return value if isinstance(value, numpy.ndarray) else numpy.array(keras.ops.convert_to_numpy(value))


def _number(value: Any) -> Any:
    """Return a metric's result, a value or a dict of values, as numpy arrays."""
    return {name: _array(each) for name, each in value.items()} if isinstance(value, dict) else _array(value)


def _copy(metric: Any) -> Any:
    """Return a copy of the metric with its own variables, in the element type of the run."""
    import keras

    content = metric.get_config()
    if keras.config.floatx() == "float64" and "dtype" in content:
        content["dtype"] = "float64"
    made = type(metric).from_config(content)
    compute_in_floatx(made)
    return made
