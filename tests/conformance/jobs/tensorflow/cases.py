"""Train a Keras model on TensorFlow in every case of test_tensorflow.py. Arguments: OUT [CASE ...]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from distributed import Callback, TensorFlowDistributedTrainer, over_all
from distributed.testing.jobs.cases import freeze

OUT, CHOSEN = Path(sys.argv[1]), sys.argv[2:]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, GLOBAL, FEATURES, CLASSES = 49, 16, 6, 4  # the last update has one sample, so the slice of rank 1 is empty
BASE = {"epochs": 2, "global_batch_size": GLOBAL, "dtype": "float64", "shuffle": False, "log_every_n_steps": 1}


def arrays():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(SAMPLES, FEATURES))
    return x, (x @ draw.normal(size=(FEATURES, CLASSES))).argmax(1)


X, Y = arrays()


@keras.saving.register_keras_serializable()
class Fixed(keras.initializers.Initializer):
    """Initialize with the same weights in every element type."""

    def __call__(self, shape, dtype=None):
        return tf.cast(np.random.RandomState(shape[0]).normal(size=shape), dtype) / shape[0]


def layers(last=None, **first):
    hidden = keras.layers.Dense(8, activation="tanh", kernel_initializer=Fixed(), **first)
    return [hidden, keras.layers.Dense(CLASSES, activation=last, kernel_initializer=Fixed())]


def net(last=None, **first):
    return keras.Sequential([keras.Input((FEATURES,)), *layers(last, **first)])


def unbuilt():
    return keras.Sequential(layers())


def sgd(params=None):
    return keras.optimizers.SGD(0.1, momentum=0.9)


def compiled():
    model = net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=sgd(), loss=loss, metrics=["accuracy", "sparse_categorical_crossentropy"])
    return model


@keras.saving.register_keras_serializable()
class Largest(keras.metrics.Metric):
    """Have a variable that is no sum, without declaring it."""

    def __init__(self, name="largest", **more):
        super().__init__(name=name, **more)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, targets, outputs, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.cast(tf.reduce_max(outputs), self.value.dtype)))

    def result(self):
        return self.value.value


def measured_by_compile():
    model = net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer=sgd(), loss=loss, metrics=[keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False, name="union")]
    )
    return model


def of_torch():
    methods = dict.fromkeys(("update", "compute", "reset"), lambda self: None)
    return type("F1", (), {"__module__": "torchmetrics.f1", **methods})()


def mean_union(outputs):
    """Return the mean over the classes of intersection over union."""
    unions = []
    for label in range(CLASSES):
        found, wanted = outputs.argmax(1) == label, label == Y
        if (found | wanted).any():
            unions.append((found & wanted).sum() / (found | wanted).sum())
    return float(np.mean(unions))


def over_all_samples():
    """Return measured and expected values of a compiled metric, a user's metric, a declared function and one found to be no mean."""
    order = over_all(lambda outputs, targets: float(np.dot(outputs[:, 0], np.arange(len(targets)))))
    metrics = {"largest": Largest(), "order": order, "root": lambda o, t: tf.sqrt(tf.reduce_mean(o**2))}
    trainer, seen = train(
        measured_by_compile, val=(X, Y), optimizer=None, metrics=metrics, first=lambda trainer: trainer.evaluate((X, Y))
    )
    outputs = trainer.predict((X, Y))
    expected = {
        "union": mean_union(outputs), "largest": outputs.max(), "order": np.dot(outputs[:, 0], np.arange(SAMPLES)),
        "root": np.sqrt((outputs**2).mean()),
    }  # fmt: skip
    return seen | {"expected": {name: float(value) for name, value in expected.items()}}


def drawing_loss(outputs, targets):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    return tf.reduce_mean(losses * keras.random.uniform((), 0.5, 1.5, dtype="float64"))


def drawing_metric(outputs, targets):
    return float(keras.random.uniform(())) + np.random.random()


class Watch(Callback):
    def __init__(self):
        self.norms, self.rates, self.skipped = [], [], []

    def on_log(self, state, split, metrics):
        if split == "train":
            self.norms.append(metrics.get("grad_norm"))
            self.rates.append(metrics["learning_rate"])

    def on_step_end(self, state, result):
        self.skipped.append(result.skipped)


class Indexed:
    """Provide a data set in the style of torch, without torch."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index], Y[index]


class Drawing(Indexed):
    def __getitem__(self, index):
        return X[index] + 0.01 * np.random.normal(size=FEATURES), Y[index]


def weights(model):
    return [float(v) for w in model.trainable_variables for v in w.numpy().ravel()]


def train(model=net, data=(X, Y), val=None, optimizer=sgd, first=lambda trainer: None, **settings):
    watch = Watch()
    trainer = TensorFlowDistributedTrainer(model, optimizer=optimizer, callbacks=[watch], **{**BASE, **settings})
    first(trainer)
    history = trainer.fit(data, val)
    seen = {
        "weights": weights(trainer.model), "rows": history.rows, "norms": watch.norms, "rates": watch.rates,
        "skipped": watch.skipped, "dtypes": sorted({v.dtype for v in trainer.model.trainable_variables}),
    }  # fmt: skip
    return trainer, seen


def facts(*args, **settings):
    return train(*args, **settings)[1]


def deterministic():
    from tensorflow.python.framework.config import is_op_determinism_enabled

    before = is_op_determinism_enabled()
    return facts(deterministic=True) | {"determinism": [before, is_op_determinism_enabled()]}


RATE = 0.1  # learning rate of `sgd`


def momentum():
    """Return SGD(0.1, momentum=0.9) as a function of (weights, gradients, rate, update from 1)."""
    velocities = {}

    def update(i, weight, gradient, rate, number):
        velocities[i] = 0.9 * velocities.get(i, 0.0) - rate * gradient
        return weight + velocities[i]

    return update


def adamw():
    """Return AdamW as Keras computes it, with torch's defaults. Keras adds epsilon to the root before bias correction."""
    moments = {}

    def update(i, weight, gradient, rate, number):
        one, two = moments.get(i, (0.0, 0.0))
        one, two = 0.9 * one + 0.1 * gradient, 0.999 * two + 0.001 * gradient**2
        moments[i] = one, two
        alpha = rate * np.sqrt(1 - 0.999**number) / (1 - 0.9**number)
        return weight * (1 - rate * 1e-2) - alpha * one / (np.sqrt(two) + 1e-8)

    return update


def by_hand(rates=None, clip=None, update=None, loss=None, epochs=2):
    """Return the final weights of a plain loop on one process, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    model, update = net(), update or momentum()
    loss = loss or (lambda m, x, y: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, m(x))))
    updates = [slice(start, start + GLOBAL) for start in range(0, SAMPLES, GLOBAL)] * epochs
    for number, cut in enumerate(updates):
        with tf.GradientTape() as tape:
            value = loss(model, X[cut], Y[cut])
        gradients = [g.numpy() for g in tape.gradient(value, [v.value for v in model.trainable_variables])]
        if clip is not None:
            norm = np.sqrt(sum((g**2).sum() for g in gradients))
            gradients = [g * min(clip / (norm + 1e-6), 1.0) for g in gradients]
        rate = RATE if rates is None else rates[number]
        for i, (variable, gradient) in enumerate(zip(model.trainable_variables, gradients, strict=True)):
            variable.assign(update(i, variable.numpy(), gradient, rate, number + 1))
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    return {"weights": weights(model)}


def mean_square(model, x, y):
    return tf.reduce_mean(tf.math.squared_difference(model(x), tf.one_hot(y, CLASSES, dtype=tf.float64)))


def weighted(outputs, targets):
    """Return (sum, count), in which each class is weighted by its number."""
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    count = tf.cast(targets, outputs.dtype)
    return tf.reduce_sum(each * count), tf.reduce_sum(count)


def weighted_by_hand(model, x, y):
    total, count = weighted(model(x), y)
    return total / count


def step(model, batch):
    x, y = batch
    outputs = model(x, training=True)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs))
    return {"loss": loss, "size": tf.size(y), "union": (outputs, y), "nll": (outputs, y)}


def stepped():
    """Return measured and expected values of Keras metrics whose arguments a training_step returns."""
    metrics = {
        "union": keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False),
        "nll": keras.metrics.SparseCategoricalCrossentropy(from_logits=True),  # a mean over samples
    }
    trainer, seen = train(training_step=step, metrics=metrics, val=(X, Y))
    outputs = trainer.predict((X, Y))
    nll = np.log(np.exp(outputs).sum(1)) - outputs[np.arange(SAMPLES), Y]
    return seen | {"expected": {"union": mean_union(outputs), "nll": float(nll.mean())}}


def logged_in_step():
    held = []

    def logs(model, batch):
        held[0].log("seen", 1.0)
        return step(model, batch)["loss"]

    return train(training_step=logs, first=held.append)[1]


def decay(optimizer=None):
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


def nan_at(number):
    def loss(outputs, targets):  # the last sample of the data makes the loss NaN
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs))

    x = X.copy()
    x[number] = np.nan
    return {"data": (x, Y), "loss_fn": loss}


def dropping():
    keras.utils.set_random_seed(7)
    layers = [
        keras.layers.Dense(8),
        keras.layers.Dropout(0.5),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(CLASSES),
    ]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def resumed():
    """Run the same training in two halves, split inside an epoch."""
    path = OUT / "half"
    trainer, _ = train(dropping, shuffle=True, max_steps=3)
    trainer.save(path)
    return facts(dropping, shuffle=True, resume_from_checkpoint=str(path))


def outputs():
    trainer, seen = train(val=(X, Y))
    predicted = trainer.predict((X, Y))
    expected = trainer.model(X).numpy()
    measured = trainer.evaluate((X, Y))
    return {
        "apart": float(np.abs(predicted - expected).max()), "length": len(predicted), "measured": measured,
        "last": seen["rows"][-1], "accuracy": float((expected.argmax(1) == Y).mean()),
    }  # fmt: skip


def objects(model):
    """Check that the user's object has the trained weights, although another object was trained in its element type."""
    before = weights(model)
    trainer, seen = train(model)
    return {**seen, "own": weights(model), "before": before, "kept": trainer.model is not model}


def mixed():
    trainer, seen = train(dtype="float32", mixed_precision="bf16")
    return {**seen, "computes": trainer.model.layers[0].compute_dtype}


def again():
    """Continue with a second fit from the first."""
    trainer, _ = train(epochs=1)
    trainer.fit((X, Y))
    return {"weights": weights(trainer.model)}


def datasets():
    x, y = tf.data.Dataset.from_tensor_slices((X, Y)), tf.data.Dataset.from_tensor_slices((X, Y)).batch(5).prefetch(2)
    return facts(data=x), facts(data=y, global_batch_size=GLOBAL)


def shuffled(seed):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES, seed=seed).batch(GLOBAL)
    return facts(data=data)


def torch_loader():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=GLOBAL)
    return facts(data=loader)


CASES = {
    "hand": by_hand,
    "plain": facts,
    "hand-adamw": lambda: by_hand([0.02] * 8, update=adamw()),
    "adamw": lambda: facts(optimizer=None, learning_rate=0.02),
    "hand-clipped": lambda: by_hand(clip=0.05),
    "clipped": lambda: facts(gradient_clipping=0.05),
    "accumulated": lambda: facts(gradient_accumulation_steps=2),
    "hand-warmed": lambda: by_hand(rates=[RATE / 3, RATE * 2 / 3, *[RATE] * 6]),
    "warmed": lambda: facts(warmup_steps=3),
    "hand-decayed": lambda: by_hand(rates=[0.1 * 0.5 ** (i / 2) for i in range(8)]),
    "decayed": lambda: facts(optimizer=lambda params: keras.optimizers.SGD(decay(), momentum=0.9)),
    "decayed-argument": lambda: facts(scheduler=decay),
    "hand-decayed-warmed": lambda: by_hand(rates=[0.1 * 0.5 ** (i / 2) * min(1, (i + 1) / 3) for i in range(8)]),
    "decayed-warmed": lambda: facts(scheduler=decay, warmup_steps=3),
    "hand-set-rate": lambda: by_hand(rates=[0.03] * 8),
    "set-rate": lambda: facts(learning_rate=0.03),
    "scaled": lambda: facts(lr_scaling="linear", gradient_accumulation_steps=2, optimizer=None, learning_rate=0.004),
    "object": lambda: objects(net()),
    "compiled": lambda: facts(compiled, optimizer=None),
    "over-all": over_all_samples,
    "compiled-object": lambda: facts(compiled(), optimizer=None),
    "unbuilt": lambda: objects(unbuilt()),
    "softmax": lambda: facts(lambda: net("softmax")),
    "named": lambda: facts(data={"inputs": X, "labels": Y}),
    "indexed": lambda: facts(data=Indexed()),
    "samples": lambda: datasets()[0],
    "batches": lambda: datasets()[1],
    "loader": torch_loader,
    "drawing": lambda: facts(data=Drawing(), shuffle=True),
    "shuffled-1": lambda: shuffled(1),
    "shuffled-2": lambda: shuffled(2),
    "seed-0": lambda: facts(shuffle=True),
    "seed-1": lambda: facts(shuffle=True, seed=1),
    "loss-object": lambda: facts(loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
    "hand-squares": lambda: by_hand(loss=mean_square),
    "squares": lambda: facts(data=(X, np.eye(CLASSES)[Y])),
    "hand-weighted": lambda: by_hand(loss=weighted_by_hand),
    "weighted": lambda: facts(loss_fn=weighted, gradient_accumulation_steps=2),
    "hand-sample-weights": lambda: by_hand(
        loss=lambda m, x, y: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(y, m(x)) * (1.0 + tf.cast(y, tf.float64))
        )
    ),
    "sample-weights": lambda: facts(data=(X, Y, 1.0 + Y)),
    "step": stepped,
    "drawn": lambda: facts(loss_fn=drawing_loss),
    "drawn-measured": lambda: facts(loss_fn=drawing_loss, metrics={"drawn": over_all(drawing_metric)}),
    "regularized": lambda: facts(
        lambda: net(kernel_regularizer=keras.regularizers.L2(0.1)), gradient_accumulation_steps=2
    ),
    "hand-regularized": lambda: by_hand(
        loss=lambda m, x, y: (
            tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, m(x)))
            + 0.1 * tf.reduce_sum(m.layers[0].kernel ** 2)
        )
    ),
    "float32": lambda: facts(dtype="float32"),
    "mixed": mixed,
    "nan-stop": lambda: facts(**nan_at(20)),
    "nan-skip": lambda: facts(**nan_at(20), nan_policy="skip"),
    "nan-warn": lambda: facts(**nan_at(20), nan_policy="warn"),
    "dropping": lambda: facts(dropping, shuffle=True),
    "dropping-again": lambda: facts(dropping, shuffle=True),
    "dropping-resumed": resumed,
    "deterministic": deterministic,
    "outputs": outputs,
    "again": again,
    "max-steps": lambda: facts(max_steps=3),
    "stopped": lambda: facts(val=(X, -0.0 * X[:, 0] + Y), epochs=50, early_stopping_patience=1, learning_rate=5.0),
    # what is refused
    "logged-in-step": logged_in_step,
    "of-torch": lambda: facts(metrics={"f1": of_torch()}),
    "summed": lambda: facts(loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")),
    "four": lambda: facts(data=(X, X, X, Y)),
    "weights-of-own": lambda: facts(data=(X, Y, 1.0 + Y), loss_fn=lambda outputs, targets: tf.reduce_mean(outputs)),
    "uneven": lambda: facts(data=(X, Y[:-1])),
    "different": lambda: facts(data=(X[: SAMPLES - RANK], Y[: SAMPLES - RANK])),
    "streams": lambda: shuffled(RANK + 1),
    "array": lambda: facts(data=X),
    "generator": lambda: facts(data=(each for each in [1])),
    "no-model": lambda: facts(lambda: 3),
    "accumulating": lambda: facts(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)),
    "scheduled-rate": lambda: facts(scheduler=decay, learning_rate=0.1),
    "synchronized": lambda: facts(
        lambda: keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(CLASSES)]
        )
    ),
    "no-loss": lambda: facts(data=(X, X)),
    "unused-loss": lambda: facts(loss_fn=lambda outputs, targets: tf.reduce_sum(tf.cast(targets, tf.float64))),
}


def main():
    for number, name in enumerate(CHOSEN or CASES):
        try:
            content = CASES[name]()
        except Exception as error:  # recorded for the test, which knows whether to expect it
            content = {"error": f"{type(error).__name__}: {error}"}
        (OUT / f"{name}-{RANK}.json").write_text(json.dumps(content))
        if number == 0:
            freeze()  # do not collect what the first fit imported


main()
