"""Keep constants exact when Keras computes in float64.

Workaround (Keras 3.15 on TensorFlow 2.21, tensorflow/tensorflow#57779; may go when Keras converts Python numbers to the
wanted type directly): TensorFlow's `cast` rounds a Python number to float32 first, as its documentation says, and two
activations of Keras round their factors. That changes weights by 1e-9 and more after some updates.
"""

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
    """Within the block, trace graphs with exact constants, such as regularization factors, slopes and scales."""
    replaced = [
        (backend, "cast"),
        (engine, "cast"),
        (engine.core, "cast"),
        (engine.nn, "gelu"),
        (engine.nn, "leaky_relu"),
    ]
    before = [getattr(module, name) for module, name in replaced]
    for module, name in replaced:
        setattr(module, name, {"cast": _cast, "gelu": _gelu, "leaky_relu": _leaky_relu}[name])
    try:
        yield
    finally:
        for (module, name), function in zip(replaced, before, strict=True):
            setattr(module, name, function)


_keras_cast = engine.core.cast


def _cast(x: Any, dtype: Any) -> Any:
    is_number = isinstance(x, float) and "float" in backend.standardize_dtype(dtype)
    return tf.constant(x, dtype) if is_number else _keras_cast(x, dtype)


def _gelu(x: Any, approximate: bool = True) -> Any:
    """Compute GELU as TensorFlow and torch define it."""
    x = tf.convert_to_tensor(x)
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + tf.tanh(inner))
    return 0.5 * x * (1.0 + tf.math.erf(x / math.sqrt(2.0)))


def _leaky_relu(x: Any, negative_slope: float = 0.2) -> Any:
    x = tf.convert_to_tensor(x)
    return tf.where(x > 0, x, negative_slope * x)
