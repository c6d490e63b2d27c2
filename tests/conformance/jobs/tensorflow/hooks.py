"""Log, validate, evaluate and save as hooks and the clock ask for it, in fits of a Keras model on TensorFlow: hooks.py OUT.

For each case OUT gets CASE.safetensors, the weights, CASE.json, the rows and the run directory, and CASE-RANK.json, what each rank saw.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from distributed import Callback, TensorFlowDistributedTrainer
from distributed.loggers import Image, Text
from tests.conformance.jobs.asking import AsksToSave, Evaluates, StopsAfterThree, write
from tests.conformance.jobs.logs_in_hooks import LogsInHooks

x = np.random.default_rng(0).normal(size=(44, 6))
DATA = (x, (x.sum(1) > 0).astype(int))
BASE = {
    "global_batch_size": 11, "epochs": 2, "dtype": "float64", "shuffle": False, "learning_rate": 1e-2, "log_every_n_steps": 2,
    "checkpoint_frequency": None, "keep_best": False, "verbose": False,
}  # fmt: skip
ENDLESS = {"epochs": 10**4, "log_every_n_steps": 10**6}
PIXELS = [[0, 50, 100], [150, 200, 250]]


@keras.saving.register_keras_serializable()
class Fixed(keras.initializers.Initializer):
    """Initialize with the same weights in each fit."""

    def __call__(self, shape, dtype=None):
        return keras.ops.cast(np.random.RandomState(shape[0]).normal(size=shape), dtype)


class LogsMedia(Callback):
    """Log an image of a tensor, and a text on each rank."""

    def on_step_end(self, state, result):
        if state.step == 3:
            self.context.log("pixels", Image(tf.constant(PIXELS, tf.uint8)))
            self.context.log("note", Text(f"of {self.context.worker.rank}"), on_every_rank=True)


def net():
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(2, kernel_initializer=Fixed(), name="head")], name="net"
    )


def fit(out, case, *callbacks, data=DATA, validation=None, **settings):
    """Train a case and write its results. All ranks call it."""
    trainer = TensorFlowDistributedTrainer(net, callbacks=callbacks, **{**BASE, **settings})
    history = trainer.fit(data, validation)
    trainer.save(out / f"{case}.safetensors")
    seen = {name: value for each in callbacks for name, value in vars(each).items() if name in ("evaluated", "saved")}
    write(out, case, history, **seen)
    if trainer.is_main_process:
        found = {"rows": history.rows, "run_dir": str(Path(history.run_dir).absolute())}
        (out / f"{case}.json").write_text(json.dumps(found))


def main(out):
    fit(out, "logged", LogsInHooks(), LogsMedia(), epochs=1)
    fit(out, "plain")
    fit(out, "evaluated", Evaluates(DATA))
    fit(out, "by-the-clock", StopsAfterThree(), validation=DATA, **ENDLESS, validate_every_s=0.01)
    fit(out, "saved", AsksToSave(), **ENDLESS)
    endless = tf.data.Dataset.from_tensor_slices(DATA).repeat()
    fit(out, "stream", data=endless, validation=DATA, max_steps=10, validate_every_n_steps=3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
