"""Parts of the suite's cases for Keras models. torch_parts.py has the same names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy
from keras import ops

from distributed.testing.jobs import overall

SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 is divisible by none of 2, 3 and 4
RATE = 1e-2
# Index of the poisoned sample in unshuffled order. It is in the last rank's slice of the third update. An update has 22 samples.
_NAN_AT = 65
_WEIGHTS = (1.0, 5.0, 0.5, 2.0, 1.5)  # weight of each class in the weighted case


# ------------------------------------------------------------------ data


def samples(dtype: str, kind: str = "", sign: int = 1) -> Any:
    """Return inputs, classes and, for some kinds, a weight of each sample.

    With kind `ignored` the first 60 samples have weight 0, so that whole slices of an update have none left.
    """
    draw = numpy.random.default_rng(7)
    x, y = (sign * draw.normal(size=(SAMPLES, FEATURES))).astype(dtype), draw.integers(0, CLASSES, SAMPLES)
    weights = {"ignored": (numpy.arange(SAMPLES) >= 60) * 1.0, "weighted": numpy.array(_WEIGHTS)[y]}
    return (x, y, weights[kind].astype(dtype)) if kind in weights else (x, y)


def classes(dtype: str) -> Any:
    """Return the targets of `samples`."""
    return samples(dtype)[1]


def source(dtype: str, kind: str = "") -> Any:
    """Return the training data.

    Kind `stream` is a tf.data.Dataset, which is read in its own order. In kind `poisoned` one sample is NaN.
    """
    x, y, *weights = samples(dtype, kind)
    if kind == "poisoned":
        x[_NAN_AT] = float("nan")
    if kind == "stream":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y))
    return (x, y, *weights)


def numbers(outputs: Any) -> numpy.ndarray[Any, Any]:
    """Return predictions as float64."""
    return numpy.asarray(outputs, dtype="float64")


# ------------------------------------------------------------------ models


class Drawn(keras.initializers.Initializer):  # type: ignore[misc]
    """Initializer with the same weights in every element type. Keras's own initializers draw other weights in
    float64."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return ops.cast(numpy.random.default_rng(shape).uniform(-1.0, 1.0, shape) / shape[0] ** 0.5, dtype)


def _net(*activations: str) -> Any:
    """Return a net with hidden layers of 16 units and the scores of the classes as output. Its names are the same
    each time."""
    sizes = [*(16 for _ in activations), CLASSES]
    layers = [
        keras.layers.Dense(size, activation=activation, kernel_initializer=Drawn(), name=f"dense{number}")
        for number, (size, activation) in enumerate(zip(sizes, (*activations, None), strict=True))
    ]
    return keras.Sequential([keras.Input((FEATURES,)), *layers], name="net")


def model() -> Any:
    return _net("relu")


def smooth() -> Any:
    """Return a net without ReLU, whose corner makes results depend on rounding."""
    return _net("tanh", "tanh")


same_weights = smooth  # the same weights in every run, whatever its seed
counted = smooth


def sampled(model: Any, prompts: list[str]) -> list[str]:
    """Return the sum of the outputs for random inputs, for `SampleText`."""
    inputs = numpy.random.randn(4, FEATURES).astype(model.dtype)
    return [f"{float(ops.sum(model(inputs))):.9f} 0" for _ in prompts]


# ------------------------------------------------------------------ what the engine does with them


def counts() -> dict[str, int]:
    """Return no counts: no engine of Keras models recomputes or compiles them."""
    return {}


def is_deterministic() -> bool:
    from tensorflow.python.framework import config

    return bool(config.is_op_determinism_enabled())


# ------------------------------------------------------------------ losses


def unreduced(outputs: Any, targets: Any) -> Any:
    return ops.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


def pair_loss(outputs: Any, targets: Any) -> Any:
    """Return a loss and a weight that differs from slice to slice."""
    weights = 1.0 + ops.cast(targets % 3, outputs.dtype)
    return ops.sum(unreduced(outputs, targets) * weights), ops.sum(weights)


def ignoring() -> dict[str, Any]:
    """Return settings of a case whose loss ignores the targets that `samples` marks."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    return {"data": "ignored", "loss_fn": loss}


def weighing() -> dict[str, Any]:
    """Return settings of a case whose loss weighs the classes."""
    return {"data": "weighted"}


def poisoned() -> dict[str, Any]:
    """Return settings of a case whose third update is NaN on the last rank."""
    return {"data": "poisoned", "shuffle": False}


# ------------------------------------------------------------------ metrics


def root_mean(outputs: Any, targets: Any) -> Any:
    """Return a metric that is not a mean over samples, but is not declared with `over_all`."""
    return ops.sqrt(ops.mean(outputs**2))


def metrics() -> dict[str, Any]:
    """Return metrics over all samples of each form."""
    union = keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)
    return {**overall.declared(), overall.FOUND_OUT: root_mean, "object": union}


# ------------------------------------------------------------------ optimizers and schedules


def sgd(variables: Iterable[Any]) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-3)


def plain_sgd(variables: Iterable[Any]) -> Any:
    return keras.optimizers.SGD(1.0)


def adamw(variables: Iterable[Any]) -> Any:
    return keras.optimizers.AdamW(RATE, weight_decay=1e-2, epsilon=1e-8)


def cosine(optimizer: Any) -> Any:
    return keras.optimizers.schedules.CosineDecay(0.05, 20)


halving = None  # no schedule of Keras counts epochs


# ------------------------------------------------------------------ a short job


def short() -> tuple[Any, Any]:
    """Return a factory of a small model, and 32 samples for it."""
    inputs = numpy.random.default_rng(1).normal(size=(32, 6)).astype("float32")
    return lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), (inputs, inputs.argmax(1) % 3)
