"""Log, validate, evaluate and save as hooks and the clock ask for it, with named optimizers and callbacks of the package, in fits of a
Keras model on any engine: hooks.py OUT.

For each case OUT gets CASE.safetensors, the weights, CASE.json, the rows and the run directory, and CASE-RANK.json, what each rank saw.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from distributed import Callback, Trainer
from distributed.callbacks import Freeze, SampleText, ThroughputAndMFU
from distributed.loggers import Image, Text
from distributed.testing.jobs.cases import freeze
from tests.conformance.jobs.asking import AsksToSave, Evaluates, StopsAfterThree, write
from tests.conformance.jobs.logs_in_hooks import LogsInHooks

x = np.random.default_rng(0).normal(size=(44, 6))
y = (x.sum(1) > 0).astype(int)
BASE = {
    "global_batch_size": 11, "epochs": 2, "dtype": "float64", "shuffle": False, "learning_rate": 1e-2, "log_every_n_steps": 2,
    "checkpoint_frequency": None, "keep_best": False, "verbose": False,
}  # fmt: skip
ENDLESS = {"epochs": 10**4, "log_every_n_steps": 10**6}
NAMED = {
    "optimizer": "adamw", "weight_decay": 0.3, "layer_rates": {"body": 0.5}, "scheduler": "cosine", "warmup_steps": 2,
    "min_learning_rate": 1e-3, "validate_every_n_steps": 3, "validate_at_start": True, "monitor": "val_in_loss",
}  # fmt: skip
PIXELS = [[0, 50, 100], [150, 200, 250]]


class Samples:
    def __init__(self, x=x, y=y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


DATA = Samples()


@keras.saving.register_keras_serializable()
class Fixed(keras.initializers.Initializer):
    """Initialize with the same weights in each fit."""

    def __call__(self, shape, dtype=None):
        return keras.ops.cast(np.random.RandomState(shape[0]).normal(size=shape), dtype)


class LogsMedia(Callback):
    """Log an image of a tensor, and a text on each rank."""

    def on_step_end(self, state, result):
        if state.step == 3:
            self.context.log("pixels", Image(keras.ops.convert_to_tensor(np.array(PIXELS, "uint8"))))
            self.context.log("note", Text(f"of {self.context.worker.rank}"), on_every_rank=True)


def net():
    layers = [
        keras.layers.Dense(4, activation="tanh", kernel_initializer=Fixed(), name="body"),
        keras.layers.Dense(2, kernel_initializer=Fixed(), name="head"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers], name="net")


def told(model, prompts):
    """Return the output of the model for the first sample, as a text for each prompt."""
    outputs = keras.ops.convert_to_numpy(model(keras.ops.convert_to_tensor(x[:1])))
    return [f"{float(outputs.sum()):.9f}" for _ in prompts]


def endless():
    """Return a stream of the samples that never ends."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((x, y)).repeat()
    from torch.utils.data import IterableDataset

    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield from zip(x, y, strict=True)

    return Endless()


def fit(out, case, *callbacks, data=DATA, validation=None, **settings):
    """Train a case and write its results. All ranks call it."""
    trainer = Trainer(net, callbacks=callbacks, **{**BASE, **settings})
    history = trainer.fit(data, validation)
    trainer.save(out / f"{case}.safetensors")
    seen = {name: value for each in callbacks for name, value in vars(each).items() if name in ("evaluated", "saved")}
    write(out, case, history, **seen)
    if trainer.is_main_process:
        found = {"rows": history.rows, "run_dir": str(Path(history.run_dir).absolute())}
        (out / f"{case}.json").write_text(json.dumps(found))


def main(out):
    fit(out, "logged", LogsInHooks(), LogsMedia(), epochs=1)
    freeze()  # do not collect what the first fit imported
    fit(out, "plain")
    fit(out, "evaluated", Evaluates(DATA))
    fit(out, "by-the-clock", StopsAfterThree(), validation=DATA, **ENDLESS, validate_every_s=0.01)
    fit(out, "saved", AsksToSave(), **ENDLESS)
    fit(out, "stream", data=endless(), validation=DATA, max_steps=10, validate_every_n_steps=3)
    fit(out, "named", validation={"in": DATA, "out": Samples(-x[:9], y[:9])}, **NAMED)
    if keras.backend.backend() == "torch":
        fit(out, "frozen", Freeze("head", until_step=3), max_steps=3, epochs=1)
        told_of = SampleText(["one", "two"], generate=told, every_n_steps=3, name="told")
        fit(out, "observed", told_of, ThroughputAndMFU(peak_flops=1e12))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
