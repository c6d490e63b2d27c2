"""Return the graph of a Keras model, and the values of its weights and gradients, for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import tensorflow as tf


def graph_of(predict: Callable[[Any], Any], batch: Any) -> bytes:
    """Return the GraphDef of `predict` for one sample of `batch`. `predict` is only traced, so no generator and no
    moving average changes."""
    form = tf.nest.map_structure(lambda leaf: tf.TensorSpec((1, *leaf.shape[1:]), leaf.dtype), batch)
    traced = tf.function(predict, autograph=False).get_concrete_function(form)
    content: bytes = traced.graph.as_graph_def().SerializeToString()
    return content


def values_of(variables: Sequence[Any], gradients: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (`weights/PATH` or `gradients/PATH`, flat array) pairs."""
    for variable in variables:
        yield f"weights/{variable.path}", _flat(variable.value)
    for variable, gradient in zip(variables, gradients):  # noqa: B905 - no gradients before the first update
        yield f"gradients/{variable.path}", _flat(gradient)


def _flat(value: Any) -> Any:
    array = value.numpy()
    return (array if array.dtype == numpy.float64 else array.astype(numpy.float32)).reshape(-1)
