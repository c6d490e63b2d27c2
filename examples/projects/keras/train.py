"""Classify handwritten digits with Keras on PyTorch's engines or on TensorFlow. One script, the backend decides.

KERAS_BACKEND=torch python train.py
distributed train --script train.py --backend pytorch-ddp --nproc-per-node 2
distributed train --script train.py --backend tensorflow --nproc-per-node 2
"""

from pathlib import Path

import keras
import numpy
from sklearn.datasets import load_digits

from distributed import Trainer


class Digits:
    """Images [8, 8, 1] with values from 0 to 1, and their classes: 80 % for training, 20 % for evaluation, always
    the same split."""

    def __init__(self, train: bool) -> None:
        data = load_digits()
        order = numpy.random.default_rng(0).permutation(len(data.images))
        chosen = order[:1437] if train else order[1437:]
        self.images = (data.images[chosen, :, :, None] / 16).astype("float32")
        self.labels = data.target[chosen].astype("int64")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[numpy.ndarray, int]:
        return self.images[index], int(self.labels[index])


def net() -> keras.Model:
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.Conv2D(64, 3, padding="same", activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10),
    ])  # fmt: skip
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    trainer = Trainer(net, Path(__file__).with_name("config.yaml"))
    trainer.fit(Digits(train=True), Digits(train=False))
    accuracy = trainer.evaluate(Digits(train=False))["accuracy"]
    if trainer.is_main_process:
        print(f"held-out accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
