"""Train a Keras model on any engine. Arguments: the file for the weights."""

import sys

import keras
import numpy as np

from distributed import Trainer


class Samples:
    def __len__(self):
        return 70

    def __getitem__(self, index):
        x = np.random.RandomState(index).normal(size=8)
        return x, int(x[:3].argmax())


layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((8,)), *layers])
trainer = Trainer(
    model, epochs=2, global_batch_size=16, learning_rate=0.013, dtype="float64", gradient_clipping=0.2, warmup_steps=2,
    loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True), shuffle=True,
)  # fmt: skip
trainer.fit(Samples(), Samples())
trainer.save(sys.argv[1])
