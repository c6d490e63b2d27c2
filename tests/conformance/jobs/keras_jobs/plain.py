"""Train in a plain script whose Keras runs on another engine than its workers, with classes of this module and a compiled model."""

from pathlib import Path

import keras
import numpy
from safetensors.numpy import load_file

from distributed import ConfigError, PyTorchDDPTrainer


class Scale(keras.layers.Layer):
    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, x):
        return x * self.factor


class Own(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)


class Data:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        draw = numpy.random.default_rng(index)
        return draw.standard_normal(12).astype("float32"), int(draw.integers(0, 5))


def net():
    return keras.Sequential([keras.Input((12,)), Scale(), keras.layers.Dropout(0.1, seed=3), keras.layers.Dense(5)])


model = net()
model.compile(keras.optimizers.Adam(1e-2), loss=Own(), metrics=["accuracy"])
before = [variable.numpy().copy() for variable in model.weights]
trainer = PyTorchDDPTrainer(model, nproc_per_node=2, epochs=2, batch_size=8, dtype="float64")
history = trainer.fit(Data(), Data())
assert trainer.model is model
moved = max(float(abs(old - new.numpy()).max()) for old, new in zip(before, model.weights, strict=True))
print(
    f"{keras.backend.backend()}: {history.steps} steps, moved {moved > 1e-3}, accuracy {'val_accuracy' in history.rows[-1]}"
)
(stored,) = Path(history.run_dir).glob("checkpoints/step-*6/model/model.safetensors")
kept = {value.shape: value for name, value in load_file(stored).items() if "seed" not in name}
own = [keras.ops.convert_to_numpy(variable.value) for variable in model.trainable_variables]
print(f"rounded by {max(float(abs(kept[value.shape] - value).max()) for value in own):.0e}")
try:
    print(sorted(trainer.evaluate(Data())))
except ConfigError as error:
    print(error)
