"""Train the same Keras models on every engine. Each rank writes NAME-RANK.json for each case.

engines.py OUT FROM CASE...   FROM: a checkpoint of another engine, from which the case "arrived" resumes
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

from distributed import Callback, Trainer
from distributed.callbacks import ExponentialMovingAverage
from distributed.testing.jobs.cases import freeze

OUT, FROM = Path(sys.argv[1]), sys.argv[2]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
# The last update has one sample, so the slices of the other ranks are empty.
SAMPLES, GLOBAL, FEATURES, CLASSES = 49, 16, 6, 4
BASE = {
    "epochs": 2, "global_batch_size": GLOBAL, "dtype": "float64", "shuffle": True, "checkpoint_frequency": None,
    "learning_rate": 0.02,
}  # fmt: skip
FP32 = {"dtype": "float32"}
draw = np.random.default_rng(0)
X = draw.normal(size=(SAMPLES, FEATURES))
Y = (X @ draw.normal(size=(FEATURES, CLASSES))).argmax(1)
WORDS = draw.integers(1, 9, size=(SAMPLES, 5)) * (np.arange(5) < draw.integers(1, 6, size=(SAMPLES, 1)))


class Samples:
    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index]


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
        keras.Input((FEATURES,)), layers.Dense(8, activation="tanh", kernel_initializer=Fixed()),
        layers.Dense(CLASSES, kernel_initializer=Fixed()),
    ])  # fmt: skip


def compiled():
    model = net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
    return model


def tokens():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((5,), dtype="int32"), layers.Embedding(9, 6, mask_zero=True, embeddings_initializer=Fixed()),
        layers.Dense(9, kernel_initializer=Fixed()),
    ])  # fmt: skip


@keras.saving.register_keras_serializable()
def approximate(x):
    return keras.activations.gelu(x, approximate=True)


def constants():
    """Return nested layers, as an object, with constants that float32 cannot represent."""
    layers = keras.layers
    inner = keras.Sequential([
        keras.Input((FEATURES,)), layers.Rescaling(1 / 3, 0.1), layers.Normalization(mean=0.1, variance=0.3),
        layers.Dense(8, "gelu", kernel_initializer=Fixed(), kernel_regularizer=keras.regularizers.L2(0.013)),
        layers.Dense(8, kernel_initializer=Fixed()), layers.LeakyReLU(0.3),
    ])  # fmt: skip
    x = keras.Input((FEATURES,))
    return keras.Model(x, layers.Dense(CLASSES, approximate, kernel_initializer=Fixed())(inner(x)))


def in_float64():
    """Return an object whose layers are float64 before training, while its Input, which casts the batch, is not."""
    keras.config.set_dtype_policy("float64")
    model = net()
    keras.config.set_dtype_policy("float32")
    return model


def dropping():
    layers = keras.layers
    return keras.Sequential([*net().layers[:1], layers.Dropout(0.3), layers.BatchNormalization(), net().layers[1]])


def counted(outputs, targets):
    """Return (sum, count), in which each class is weighted by its number."""
    each = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
    count = keras.ops.cast(targets, outputs.dtype)
    return keras.ops.sum(each * count), keras.ops.sum(count)


class Kill(Callback):
    """Kill the last of several processes in the first attempt."""

    def on_step_end(self, state, result):
        if IS_FIRST and WORLD > 1 and (state.step, RANK) == (5, WORLD - 1):
            os.kill(os.getpid(), signal.SIGKILL)


class ByHand(Callback):
    """Average the weights by the formula of `ExponentialMovingAverage(0.8)`."""

    def on_train_start(self, state):
        self.mean = np.array(weights(self.context.model))

    def on_step_end(self, state, result):
        self.trained = np.array(weights(self.context.model))
        self.mean = 0.8 * self.mean + 0.2 * self.trained


def weights(model):
    return [float(each) for value in model.get_weights() for each in np.ravel(value)]


def train(model=net, data=None, **settings):
    trainer = Trainer(model, **{**BASE, **settings})
    history = trainer.fit(data or Samples(), Samples() if model is compiled else None)
    usual = keras.config.dtype_policy().name  # of the models that follow
    return {"weights": weights(trainer.model), "row": history.rows[-1], "run_dir": str(history.run_dir), "usual": usual}


def saved():
    trainer = Trainer(net, **BASE, **TRAVEL, max_steps=3)
    trainer.fit(Samples())
    trainer.save(OUT / "at-3")
    return {"weights": weights(trainer.model)}


def averaged(*more, **settings):
    return train(compiled, callbacks=[ExponentialMovingAverage(0.8), *more], learning_rate=0.1, **settings)


def averaged_by_hand():
    by_hand = ByHand()
    seen = averaged(by_hand)
    return {**seen, "by_hand": by_hand.mean.tolist(), "trained": by_hand.trained.tolist()}


def averaged_and_resumed():
    cut_off = averaged(max_steps=3)["run_dir"]
    return averaged(resume_from_checkpoint=str(Path(cut_off, "checkpoints", "step-00000003")))


TRAVEL = {"gradient_clipping": 0.2, "warmup_steps": 2}
CASES = {
    "killed": lambda: train(dropping, checkpoint_every_n_steps=3, callbacks=[Kill()]),
    "unhurt": lambda: train(dropping, checkpoint_every_n_steps=3),
    "compiled": lambda: train(
        compiled, learning_rate=0.1, gradient_accumulation_steps=2, gradient_clipping=0.5, warmup_steps=3
    ),
    "constants": lambda: train(constants(), learning_rate=0.05),
    "in-float64": lambda: train(in_float64()),
    "counted": lambda: train(loss_fn=counted, gradient_accumulation_steps=2),
    "tokens": lambda: train(
        tokens, Samples(WORDS.astype("int32"), (WORDS + 1) % 9),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    "empty-slices": lambda: train(global_batch_size=2, max_steps=5),
    "whole": lambda: train(**TRAVEL),
    "saved": saved,
    "averaged": averaged_by_hand,
    "averaged-resumed": averaged_and_resumed,
    "float32": lambda: train(**FP32),
    "float32-again": lambda: train(**FP32),
    "arrived": lambda: train(**TRAVEL, resume_from_checkpoint=FROM),
    "compressed": lambda: train(**FP32, horovod={"compression": "fp16"}),
    "traced": lambda: train(**FP32, horovod={"timeline": "trace/of-two.json"}),
    "with-adasum": lambda: train(**FP32, horovod={"adasum": True}),
}  # fmt: skip

for number, name in enumerate(sys.argv[3:]):
    try:
        content = CASES[name]()
    except Exception as error:  # recorded for the test, which knows whether to expect it
        content = {"error": f"{type(error).__name__}: {error}"}
    (OUT / f"{name}-{RANK}.json").write_text(json.dumps(content))
    if number == 0:
        freeze()  # do not collect what the first fit imported
