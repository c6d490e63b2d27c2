"""Keras's constants in float64. TensorFlow's `cast` rounds a number of Python to float32 first (its documentation says so), and
two of its activations round what they multiply by: 1e-9 and more in the weights after some updates."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.backend import tensorflow as engine


@contextlib.contextmanager
def exact_constants() -> Iterator[None]:
    """Within it graphs are traced with exact ones: factors of regularizers, slopes, scales."""
    places = [
        (backend, "cast"),
        (engine, "cast"),
        (engine.core, "cast"),
        (engine.nn, "gelu"),
        (engine.nn, "leaky_relu"),
    ]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        setattr(module, name, {"cast": _cast, "gelu": _gelu, "leaky_relu": _leaky_relu}[name])
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)


_keras_cast = engine.core.cast


def _cast(x: Any, dtype: Any) -> Any:
    is_number = isinstance(x, float) and "float" in backend.standardize_dtype(dtype)
    return tf.constant(x, dtype) if is_number else _keras_cast(x, dtype)


def _gelu(x: Any, approximate: bool = True) -> Any:
    """As TensorFlow and torch have it."""
    x = tf.convert_to_tensor(x)
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + tf.tanh(inner))
    return 0.5 * x * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def _leaky_relu(x: Any, negative_slope: float = 0.2) -> Any:
    x = tf.convert_to_tensor(x)
    return tf.where(x > 0, x, negative_slope * x)
