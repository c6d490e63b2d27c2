"""Train a tiny model with every kind of state that a checkpoint holds.

    job.py torch|keras|frozen|averaged|several float64|float32 [CHECKPOINT ...]

With checkpoints, one fit goes on from each of them. `draws.json` in the run directory has what rank 0 drew from its random generators
after each update. The draws are part of the state of a callback: those before a checkpoint come out of it.
"""

import json
import random
import sys

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, Trainer
from distributed.callbacks import ExponentialMovingAverage

SAMPLES, FEATURES, CLASSES = 40, 6, 4
KIND, DTYPE, CHECKPOINTS = sys.argv[1], sys.argv[2], sys.argv[3:]


class Samples(Dataset):
    """Samples with augmentation from the global generators."""

    def __init__(self, size, seed):
        generator = numpy.random.default_rng(seed)
        self.x, self.y = generator.normal(size=(size, FEATURES)), generator.integers(0, CLASSES, size)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index] * random.uniform(0.9, 1.1) + 0.1 * numpy.random.normal(size=FEATURES)
        return x.astype(DTYPE), self.y[index]


class Draws(Callback):
    """Draw one number from each generator after each update."""

    def __init__(self):
        self.draws = []

    def on_step_end(self, state, result):
        drawn = [random.random(), float(numpy.random.random())]
        self.draws.append([*drawn, torch.rand((), dtype=torch.float64).item()] if KIND != "keras" else drawn)

    def on_train_end(self, state):
        if trainer.is_main_process:
            (self.context.run_dir / "draws.json").write_text(json.dumps(self.draws) + "\n")

    def state_dict(self):
        return {"draws": self.draws}

    def load_state_dict(self, state):
        self.draws = state["draws"]


def drawn(seed, shape):
    """Return random weights."""
    return (numpy.random.default_rng(seed).normal(size=shape) / 3).astype(DTYPE)


def torch_parts():
    """Return the arguments of a Trainer for a torch model."""
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))
    for seed, parameter in enumerate(model.parameters()):  # the same weights on every backend and in every process
        parameter.data = torch.from_numpy(drawn(seed, parameter.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "loss_fn": torch.nn.functional.cross_entropy,
    }


def keras_parts():
    """Return those for a Keras model, whose optimizer has the schedule."""
    import keras

    def model():
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(CLASSES)]
        made = keras.Sequential(layers)
        for seed, weight in enumerate(made.weights):
            weight.assign(drawn(seed, weight.shape))
        return made

    schedule = keras.optimizers.schedules.CosineDecay(2e-2, 20)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"model": model, "optimizer": lambda variables: keras.optimizers.Adam(schedule), "loss_fn": loss}


def frozen_parts():
    """Return those for a torch model whose checkpoints leave out the frozen layer."""
    parts = torch_parts()
    parts["model"][0].requires_grad_(False)
    return {**parts, "checkpoint_trainable_only": True}


def averaged_parts():
    """Return those for a torch model of whose weights a moving average is kept."""
    return {**torch_parts(), "callbacks": [Draws(), ExponentialMovingAverage(0.9)]}


def several_parts():
    """Return those for two torch models with an optimizer each."""
    first = torch_parts()

    def step(models, batch, update):
        x, y = batch
        update("a", torch.nn.functional.cross_entropy(models["a"](x), y))
        update("b", torch.nn.functional.mse_loss(models["b"](x), models["a"](x).detach()))

    return {
        "models": {"a": first["model"], "b": torch_parts()["model"]},
        "optimizers": {"a": lambda parameters: torch.optim.AdamW(parameters, lr=2e-2), "b": "sgd"},
        "schedulers": {"a": "cosine"},
        "training_step": step,
        "learning_rate": 2e-2,
        "monitor": "val_loss",
    }


PARTS = {
    "torch": torch_parts, "keras": keras_parts, "frozen": frozen_parts, "averaged": averaged_parts, "several": several_parts,
}  # fmt: skip
for checkpoint in CHECKPOINTS or [False]:
    trainer = Trainer(
        **{"callbacks": [Draws()], **PARTS[KIND]()},
        resume_from_checkpoint=checkpoint,
        dtype=DTYPE,
        epochs=3,
        global_batch_size=8,
        gradient_clipping=0.5,
        warmup_steps=3,
        early_stopping_patience=5,
        checkpoint_every_n_steps=8,
        checkpoint_frequency=None,
        keep_latest_k=9,
        log_every_n_steps=1,
        seed=5,
    )
    trainer.fit(DataLoader(Samples(SAMPLES, 1), shuffle=True), Samples(10, 2))
