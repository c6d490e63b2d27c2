"""The workloads as Keras models with the same sizes, data and learning rates, for the engines that train those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy

from workloads import WORKLOADS


@dataclasses.dataclass(frozen=True)
class KerasWorkload:
    """Counterpart of `Workload`. `data` returns (inputs, targets) of the given number of samples as arrays."""

    batch_size: int
    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    gradient_clipping: float | None = None

    name: str = ""

    def initial_model(self) -> Any:
        """Return the model, with the same weights every time."""
        keras.utils.set_random_seed(0)
        return self.model()

    def data(self, samples: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        inputs, targets = WORKLOADS[self.name].data(samples).tensors
        kind = "float32" if inputs.is_floating_point() else "int32"
        return inputs.numpy().astype(kind), targets.numpy().astype("int32")


def _mlp() -> Any:
    layers = keras.layers
    return keras.Sequential([keras.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(10)])


class Places(keras.layers.Layer):
    """Layer that adds a learnt vector for each position."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.places = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        return x + self.places


def _gpt(width: int = 128, heads: int = 4, blocks: int = 4, length: int = 128) -> Any:
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    x = Places()(layers.Embedding(256, width)(tokens))
    for _ in range(blocks):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normed, normed, use_causal_mask=True)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(tokens, layers.Dense(256)(layers.LayerNormalization()(x)))


def loss_fn() -> Any:
    """Return a loss that is the mean over all elements, as the torch workloads have it."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


KERAS_WORKLOADS = {
    "mlp": KerasWorkload(32, _mlp, lambda: keras.optimizers.SGD(0.05), name="mlp"),
    "gpt": KerasWorkload(8, _gpt, lambda: keras.optimizers.AdamW(1e-3), gradient_clipping=1.0, name="gpt"),
}
