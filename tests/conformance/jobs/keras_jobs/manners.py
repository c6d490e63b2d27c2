"""Train as with Keras's `fit` on every engine. Each rank writes NAME-RANK.json for each case.

manners.py OUT CASE...
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import keras
import numpy as np

from distributed import Trainer
from distributed.testing.jobs.cases import freeze

OUT = Path(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
SAMPLES, FEATURES, CLASSES = 49, 6, 4  # the last update has one sample, so the slices of the other ranks are empty
draw = np.random.default_rng(0)
X = draw.normal(size=(SAMPLES, FEATURES))
Y = (X @ draw.normal(size=(FEATURES, CLASSES))).argmax(1)
WEIGHTS = draw.uniform(0.2, 3.0, size=SAMPLES)
CLASS_WEIGHT = {0: 1.0, 2: 3.7, 3: 0.3}  # class 1 weighs 1
SETTINGS = {"global_batch_size": 16, "dtype": "float64", "checkpoint_frequency": None, "verbose": False}
LOSS, METRICS = "sparse_categorical_crossentropy", ["accuracy", "sparse_categorical_crossentropy"]


@keras.saving.register_keras_serializable()
class Fixed(keras.initializers.Initializer):
    """Initialize with the same weights on every engine."""

    def __call__(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(
            np.float32(np.random.RandomState(shape[0]).normal(size=shape) / shape[0]), dtype=dtype
        )


def net():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((FEATURES,)), layers.Dense(8, "tanh", kernel_initializer=Fixed()),
        layers.Dense(CLASSES, "softmax", kernel_initializer=Fixed()),
    ])  # fmt: skip


def two_inputs():
    inputs = {"left": keras.Input((2,), name="left"), "right": keras.Input((4,), name="right")}
    joined = keras.layers.concatenate(list(inputs.values()))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax", kernel_initializer=Fixed())(joined))


class Recorder(keras.callbacks.Callback):
    """Record the hooks with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append(["train begin", type(self.model).__name__, self.params["epochs"], self.params["steps"]])

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(["epoch begin", epoch])

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(["epoch end", epoch, logs])

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(["batch end", batch, logs])

    def on_test_begin(self, logs=None):
        self.seen.append(["test begin"])

    def on_test_end(self, logs=None):
        self.seen.append(["test end", logs])

    def on_train_end(self, logs=None):
        self.seen.append(["train end", logs])


def optimizer(variables):
    return keras.optimizers.SGD(0.1, momentum=0.9)


def weights(model):
    return [float(each) for value in model.get_weights() for each in np.ravel(value)]


def result(trainer, history, recorder=None):
    return {
        "weights": weights(trainer.model), "rows": [dict(row) for row in history.rows], "stop_reason": history.stop_reason,
        "seen": [] if recorder is None else recorder.seen,
    }  # fmt: skip


def class_weight():
    recorder = Recorder()
    trainer = Trainer(net, optimizer=optimizer, loss_fn=LOSS, metrics=METRICS, callbacks=[recorder], **SETTINGS)
    history = trainer.fit(
        x=X, y=Y, class_weight=CLASS_WEIGHT, validation_data=(X[:20], Y[:20]), epochs=1, shuffle=False, verbose=0
    )
    return result(trainer, history, recorder)


def sample_weight():
    trainer = Trainer(two_inputs, optimizer=optimizer, loss_fn="SparseCategoricalCrossentropy", **SETTINGS)
    x = {"left": X[:, :2], "right": keras.ops.convert_to_tensor(X[:, 2:])}
    val = ({name: each[:9] for name, each in x.items()}, Y[:9], WEIGHTS[:9])
    return result(trainer, trainer.fit(x=x, y=Y, sample_weight=WEIGHTS, validation_data=val, epochs=3))


def early_stopping():
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.2)
    trainer = Trainer(net, optimizer=optimizer, loss_fn=LOSS, metrics=METRICS, callbacks=[stopping], **SETTINGS)
    history = trainer.fit(x=X, y=Y, validation_data=(X[:20], Y[:20]), epochs=30)
    return {**result(trainer, history), "stopped": [stopping.stopped_epoch, stopping.best_epoch, stopping.wait]}


def one_column(is_compiled=False):
    """Train a model of one column on targets without a column, with a loss by name or with that of the compiled model."""

    def made():
        model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(1, "sigmoid", kernel_initializer=Fixed())]
        )
        if is_compiled:
            model.compile(optimizer(None), loss="binary_crossentropy", metrics=["accuracy"])
        return model

    named = {} if is_compiled else {"optimizer": optimizer, "loss_fn": "binary_crossentropy", "metrics": ["accuracy"]}
    trainer = Trainer(made, **named, **SETTINGS)
    return result(trainer, trainer.fit(x=X, y=(Y > 1).astype("int64"), validation_data=(X[:20], Y[:20] > 1), epochs=2))


def exact():
    """Return a block in which Keras computes in float64 without rounding constants to float32."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    from distributed.backends._tensorflow.exact import exact_constants

    return exact_constants()


def of_keras():
    """Return what Keras's own fit computes for the case class-weight."""
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # on torch, Keras computes some operations in float32
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    model, recorder = net(), Recorder()
    model.compile(optimizer(None), loss=LOSS, metrics=METRICS)
    with exact():
        model.fit(
            X, Y, class_weight=CLASS_WEIGHT, validation_data=(X[:20], Y[:20]), epochs=1, shuffle=False, verbose=0,
            batch_size=16, callbacks=[recorder],
        )  # fmt: skip
    return {
        "weights": weights(model),
        "seen": [[float(e) if isinstance(e, np.floating) else e for e in s] for s in recorder.seen],
    }


CASES = {
    "class-weight": class_weight, "sample-weight": sample_weight, "early-stopping": early_stopping, "of-keras": of_keras,
    "one-column": one_column, "one-column-compiled": lambda: one_column(is_compiled=True),
}  # fmt: skip

for number, name in enumerate(sys.argv[2:]):
    (OUT / f"{name}-{RANK}.json").write_text(json.dumps(CASES[name](), default=float))
    if number == 0:
        freeze()  # do not collect what the first fit imported
