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
RATES = {"norm": 0.1, "head.bias": 3.0}
MAKERS = {
    "adam": lambda rate: kinds.Adam(rate, epsilon=1e-8),
    "adam-betas": lambda rate: kinds.Adam(rate, beta_1=0.8, beta_2=0.9, epsilon=1e-8),
    "adafactor": lambda rate: kinds.Adafactor(rate, relative_step=False),
    "adamw": lambda rate: kinds.AdamW(rate, weight_decay=0.3, epsilon=1e-8),
    "adamw-rates": lambda rate: kinds.AdamW(rate, weight_decay=0.15, epsilon=1e-8),
    "sgd": lambda rate: kinds.SGD(rate),
}
CASES = {
    "adam": {}, "adam-betas": {"betas": (0.8, 0.9)}, "adafactor": {}, "adamw": {"weight_decay": 0.3},
    "adam-decay": {"weight_decay": 0.2}, "sgd-decay": {"weight_decay": 0.2}, "sgd-rates": {"layer_rates": RATES},
    "adamw-rates": {"weight_decay": 0.15, "layer_rates": RATES}, "adafactor-rates": {"layer_rates": RATES},
}  # fmt: skip


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


def factor_of(variable, rates):
    return next((factor for start, factor in rates.items() if start in variable.path.replace("/", ".")), 1.0)


def by_hand(make, decay, rates):
    """Train with one optimizer of Keras for each rate. `decay` is added to the gradients of matrices."""
    model = net()
    variables = model.trainable_variables
    groups = {}
    for index, variable in enumerate(variables):
        groups.setdefault(factor_of(variable, rates), []).append(index)
    optimizers = {factor: make(RATE * factor) for factor in groups}
    for factor, indices in groups.items():
        optimizers[factor].build([variables[index] for index in indices])
        kept = [variables[index] for index in indices if len(variables[index].shape) < 2]
        if len(kept) == len(indices):
            optimizers[factor].weight_decay = None
        elif optimizers[factor].weight_decay:
            optimizers[factor].exclude_from_weight_decay(var_list=kept)
    for start in range(0, len(X), GLOBAL):
        x, y = (keras.ops.convert_to_tensor(each[start : start + GLOBAL]) for each in (X, Y))
        gradients = [
            gradient + decay * variable.value if len(variable.shape) > 1 else gradient
            for gradient, variable in zip(gradients_of(model, x, y), variables, strict=True)
        ]
        for factor, indices in groups.items():
            optimizers[factor].apply([gradients[index] for index in indices], [variables[index] for index in indices])
    return flat(model)


def main():
    found = {}
    for case, settings in CASES.items():
        print(f"--- {case}", flush=True)
        callbacks = [ModelSummary()] if case == "adam" else []
        name = case.partition("-")[0]
        decay = settings["weight_decay"] if case.endswith("-decay") else 0.0
        make = MAKERS.get(case, MAKERS[name])
        found[case] = [by_settings(name, callbacks, **settings), by_hand(make, decay, settings.get("layer_rates", {}))]
    Path(sys.argv[1], "weights.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
