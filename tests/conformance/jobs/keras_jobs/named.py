"""Train with optimizers that settings name, and by hand with those of Keras: named.py OUT. Writes OUT/weights.json, case -> both."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

from distributed import Trainer
from distributed.callbacks import ModelSummary

RATE, UPDATES, GLOBAL = 0.05, 6, 8
draw = np.random.default_rng(0)
X = draw.normal(size=(UPDATES * GLOBAL, 6)).astype("float32")
Y = X.sum(1, keepdims=True)
loss_fn = keras.losses.MeanSquaredError()
kinds = keras.optimizers
HAND = {
    "adam": ({}, lambda: kinds.Adam(RATE, epsilon=1e-8)),
    "adam-betas": ({"betas": (0.8, 0.9)}, lambda: kinds.Adam(RATE, beta_1=0.8, beta_2=0.9, epsilon=1e-8)),
    "adafactor": ({}, lambda: kinds.Adafactor(RATE, relative_step=False)),
    "adamw": ({"weight_decay": 0.3}, lambda: kinds.AdamW(RATE, weight_decay=0.3, epsilon=1e-8)),
}


def net():
    """Return a model whose first layer is frozen, with norms and a layer without weights."""
    keras.utils.set_random_seed(5)
    layers = [
        keras.layers.Dense(8, name="frozen", trainable=False), keras.layers.LayerNormalization(name="norm"),
        keras.layers.Activation("tanh", name="bend"), keras.layers.Dense(1, name="head"),
    ]  # fmt: skip
    return keras.Sequential([keras.Input((6,)), *layers], name="net")


def flat(model):
    return np.concatenate([np.asarray(keras.ops.convert_to_numpy(each)).ravel() for each in model.weights]).tolist()


def by_settings(name, callbacks=(), **settings):
    arguments = {
        "optimizer": name, "learning_rate": RATE, "loss_fn": loss_fn, "global_batch_size": GLOBAL, "shuffle": False,
        "checkpoint_frequency": None, "callbacks": callbacks,
    }  # fmt: skip
    trainer = Trainer(net, **arguments, **settings)
    trainer.fit(x=X, y=Y)
    return flat(trainer.model)


def gradients_of(model, x, y):
    if keras.backend.backend() == "torch":
        model.zero_grad()
        loss_fn(y, model(x)).backward()
        return [variable.value.grad for variable in model.trainable_variables]
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x))
    return tape.gradient(loss, model.trainable_variables)


def by_hand(optimizer):
    model = net()
    optimizer.build(model.trainable_variables)
    if optimizer.weight_decay:
        optimizer.exclude_from_weight_decay(
            var_list=[each for each in model.trainable_variables if len(each.shape) < 2]
        )
    for start in range(0, len(X), GLOBAL):
        x, y = (keras.ops.convert_to_tensor(each[start : start + GLOBAL]) for each in (X, Y))
        optimizer.apply(gradients_of(model, x, y), model.trainable_variables)
    return flat(model)


def main():
    found = {}
    for case, (settings, make) in HAND.items():
        print(f"--- {case}", flush=True)
        callbacks = [ModelSummary()] if case == "adam" else []
        found[case] = [by_settings(case.partition("-")[0], callbacks, **settings), by_hand(make())]
    Path(sys.argv[1], "weights.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
