"""Metrics of Keras that are no means over samples: their variables are sums over batches, which the ranks add up. Any engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from distributed.backends._keras.losses import compute_in_floatx
from distributed.backends.over_all import Engine, Kept, Measure, Update, driven
from distributed.backends.parts import Arguments, Part

OBJECT = ("reset_state", "update_state", "result")  # the methods of an object, as Keras names them
Scope = Callable[[], contextlib.AbstractContextManager[Any]]


def is_mean(metric: Any) -> bool:
    """Whether the metric is a sum over samples divided by their number or weight."""
    import keras

    return isinstance(metric, keras.metrics.Mean) and type(metric).result is keras.metrics.Mean.result


def measure_of(metric: Any, engine: Engine, scope: Scope, prepare: Callable[[Arguments], Arguments]) -> Measure:
    """What computes a Keras metric over all samples: by its variables for one of Keras's own, else from all outputs.

    Variables of Keras's metrics are sums, which those of a class of the user's need not be. `prepare` is what is kept of its
    arguments, which come as (outputs, targets), on the host.
    """
    if type(metric).__module__.startswith("keras."):
        return SumsMeasure(metric, scope)

    def drive(updates: Sequence[Update]) -> Any:
        with scope():
            return _number(driven(metric, updates, engine, OBJECT))

    return Kept(drive, lambda call: prepare(in_order_of_keras(call)))


def in_order_of_keras(call: Arguments) -> Arguments:
    """(targets, outputs) of (outputs, targets)."""
    outputs, targets, *more = call.args or (None, None)
    return call._replace(args=(targets, outputs, *more)) if call.args else call


class SumsMeasure:
    """What each batch adds to the variables of a metric, summed up in float64."""

    training = True

    def __init__(self, metric: Any, scope: Scope) -> None:
        self._given, self._scope = metric, scope
        self._sums: list[Any] | None = None

    @functools.cached_property
    def _metric(self) -> Any:
        """Made at its first use: a metric of `compile` is found while a graph is traced."""
        return _copy(self._given)

    def absorb(self, part: Part) -> None:
        """Update the metric."""
        args, named = in_order_of_keras(part.value)
        with self._scope():
            self._metric.reset_state()
            self._metric.update_state(*args, **named)
            added = [_array(variable.value).astype(numpy.float64) for variable in self._metric.variables]
        self._sums = added if self._sums is None else [a + b for a, b in zip(self._sums, added, strict=True)]

    def take(self) -> list[Part]:
        """Nothing: the sums stay here."""
        return []

    def state(self) -> list[Any] | None:
        """The sums."""
        return None if self._sums is None else list(self._sums)

    def restore(self, states: Sequence[Any]) -> None:
        """Go on from the sums of one or several ranks."""
        self._sums = _added(states) if states else None

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> Any:
        """The metric of everything."""
        with self._scope():
            self._metric.reset_state()
            for variable, total in zip(self._metric.variables, _added(states), strict=True):
                variable.assign(total.astype(variable.dtype))
            return _number(self._metric.result())

    def reset(self) -> None:
        """Forget everything."""
        self._sums = None


def _added(states: Sequence[Any]) -> list[Any]:
    return [sum(_array(each) for each in values) for values in zip(*states, strict=True)]


def _array(value: Any) -> Any:
    import keras

    return value if isinstance(value, numpy.ndarray) else numpy.array(keras.ops.convert_to_numpy(value))


def _number(value: Any) -> Any:
    """A result of Keras as numbers."""
    return {name: _array(each) for name, each in value.items()} if isinstance(value, dict) else _array(value)


def _copy(metric: Any) -> Any:
    """A metric like this with variables of its own, in the element type of the run."""
    import keras

    content = metric.get_config()
    if keras.config.floatx() == "float64" and "dtype" in content:
        content["dtype"] = "float64"
    made = type(metric).from_config(content)
    compute_in_floatx(made)
    return made
