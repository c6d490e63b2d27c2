"""Train Keras models of every form in one process group, and write NAME.npz for each case into the directory given."""

import sys
from pathlib import Path

import keras
import numpy
import torch
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, Dataset, TensorDataset

from distributed import Trainer
from distributed.testing.jobs.cases import freeze

top, Measured = keras.metrics.sparse_top_k_categorical_accuracy, keras.metrics.SparseCategoricalCrossentropy
CrossEntropy = keras.losses.SparseCategoricalCrossentropy
SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 is not divisible by 2 or 3


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def classes(*shape, low=0, high=CLASSES):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


X, Y = draw(SAMPLES, FEATURES), classes(SAMPLES)


class Named(Dataset):
    """Yield batches with names: two inputs and a target."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"left": X[index, :7], "right": X[index, 7:], "y": Y[index]}


class TwoTargets(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return X[index], {"kind": Y[index], "size": X[index].abs().sum().reshape(1)}


def net(last=None):
    layers = keras.layers
    return keras.Sequential([
        keras.Input((FEATURES,)), layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
        layers.Dense(CLASSES, activation=last),
    ])  # fmt: skip


def compiled():
    model = net("softmax")
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-3, global_clipnorm=2.0),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2")],
    )
    return model


class Lazy(keras.Model):
    """Have no variables before the first call, and a normalization, which Keras computes with operations in 32 bits."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            keras.layers.LayerNormalization(),
            keras.layers.Dense(9),
            keras.layers.Dense(CLASSES),
        )

    def call(self, x, training=False):
        return self.down(keras.ops.maximum(self.up(self.norm(x)), 0.0))


def two_inputs():
    inputs = {"left": keras.Input((7,), name="left"), "right": keras.Input((5,), name="right")}
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(keras.layers.concatenate(list(inputs.values()))))


def two_outputs():
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = {
        "kind": keras.layers.Dense(CLASSES, name="kind")(hidden),
        "size": keras.layers.Dense(1, name="size")(hidden),
    }
    model = keras.Model(inputs, outputs)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"}
    model.compile(
        "adam", loss=losses, loss_weights={"kind": 1.0, "size": 0.1}, metrics={"kind": ["accuracy"], "size": ["mae"]}
    )
    return model


def tokens():
    model = keras.Sequential([
        keras.Input((6,), dtype="int32"), keras.layers.Embedding(9, 8, mask_zero=True), keras.layers.Dense(9)
    ])  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss=loss, weighted_metrics=["accuracy"])
    return model


def token_data():
    words = classes(SAMPLES, 6, low=1, high=9) * (torch.arange(6) < classes(SAMPLES, low=1, high=7)[:, None])
    return TensorDataset(words, (words + 1) % 9)


def weighted():
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.RMSprop(1e-2), loss="mse", weighted_metrics=["mae"])
    return model


def normalized():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((FEATURES,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3, seed=5), layers.Dropout(0.1),
        layers.Dense(CLASSES),
    ])  # fmt: skip


def decayed(variables):
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, 20), beta_1=0.8)


def halved(optimizer):
    return keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)


def step(model, batch):
    x, y = batch
    return {"loss": torch.nn.functional.cross_entropy(model(x), y), "size": model(x).abs().mean()}


PLAIN = TensorDataset(X, Y)
WEIGHTS = TensorDataset(X, X.sum(1, keepdim=True), classes(SAMPLES, low=0, high=4).double())
FP32 = {"dtype": "float32"}
BASE = {
    "epochs": 3, "dtype": "float64", "global_batch_size": 22, "checkpoint_frequency": None, "seed": 3, "log_every_n_steps": 1,
    "learning_rate": None,
}  # fmt: skip
CASES = {
    "default": (net, PLAIN, {"learning_rate": 1e-2}),
    "softmax": (lambda: net("softmax"), PLAIN, {"learning_rate": 1e-2}),
    "compiled": (compiled, PLAIN, {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "warmup_steps": 4}),
    "object": (net(), PLAIN, {"optimizer": decayed, "gradient_accumulation_steps": 3, "warmup_steps": 3}),
    "rate": (compiled, PLAIN, {"learning_rate": 0.2}),
    "scheduler": (net, PLAIN, {"optimizer": lambda v: keras.optimizers.SGD(0.1), "scheduler": halved}),
    "lazy": (Lazy, PLAIN, {"loss_fn": torch.nn.functional.cross_entropy, "metrics": {"top": top}}),
    "keras-loss": (net, PLAIN, {"loss_fn": CrossEntropy(from_logits=True), "metrics": {"mean": Measured(from_logits=True)}}),
    "names": (two_inputs, Named(), {}),
    "two-outputs": (two_outputs, TwoTargets(), {}),
    "tokens": (tokens, token_data(), {"gradient_clipping": 0.3, "gradient_accumulation_steps": 2}),
    "weighted": (weighted, WEIGHTS, {}),
    "step": (net, PLAIN, {"training_step": step}),
    "empty-slices": (net, PLAIN, {"global_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 30}),
    "normalized": (normalized, PLAIN, {"epochs": 1}),
    "fp32": (net, PLAIN, FP32),
    "bf16": (net, PLAIN, FP32 | {"mixed_precision": "bf16"}),
}  # fmt: skip


def main(out: Path) -> None:
    for number, (name, (model, data, more)) in enumerate(CASES.items()):
        if name in ("fp32", "bf16"):
            data = TensorDataset(X.float(), Y)
        settings = {
            key: value for key, value in (BASE | more).items() if value is not None or key == "checkpoint_frequency"
        }
        trainer = Trainer(model, **settings)
        history = trainer.fit(DataLoader(data, batch_size=1, shuffle=True), data)
        again, predicted = trainer.evaluate(data), trainer.predict(data)
        trainer.save(out / f"{name}.safetensors")
        parts = predicted.values() if isinstance(predicted, dict) else [predicted]
        if trainer.is_main_process:
            rows = {key: [row.get(key, 0.0) for row in history.rows] for key in history.rows[-1]}
            rows = {f"row.{key}": value for key, value in rows.items() if "second" not in key and "time" not in key}
            weights = {f"weight.{key}": value for key, value in load_file(out / f"{name}.safetensors").items()}
            numpy.savez(
                out / f"{name}.npz", predicted=numpy.concatenate([part.double().numpy().reshape(-1) for part in parts]),
                **{f"again.{key}": value for key, value in again.items()}, **weights, **rows,
            )  # fmt: skip
        if number == 0:
            freeze()  # do not collect what the first fit imported


if __name__ == "__main__":
    main(Path(sys.argv[1]))
