"""Train with optimizers that settings name, with arrays, validate in a stream and by the clock, log values, and evaluate and save
in hooks: everyday.py OUT DTYPE CASE...

For each case OUT gets CASE.safetensors, the weights, CASE.json, the rows and the run directory, and CASE-RANK.json, what each rank saw.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

from distributed import Trainer
from tests.conformance.jobs.asking import AsksToSave, Evaluates, StopsAfterThree, write
from tests.conformance.jobs.logs_in_hooks import LogsInHooks

SAMPLES, GLOBAL = 44, 11  # four updates per epoch, of which each rank of two has five or six samples
generator = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, 6, generator=generator)
DATA = TensorDataset(X, (X.sum(1) > 0).long())
BASE = {
    "epochs": 2, "global_batch_size": GLOBAL, "learning_rate": 1e-2, "shuffle": False, "device": "cpu", "log_every_n_steps": 2,
    "checkpoint_frequency": None, "keep_best": False, "verbose": False,
}  # fmt: skip
OPTIMIZERS = {
    "adam": {"optimizer": "adam", "weight_decay": 0.3, "betas": (0.8, 0.9)},
    "layer-rates": {"optimizer": "adamw", "layer_rates": {"body": 0.1, "head.bias": 2.0}},
    "adafactor": {"optimizer": "adafactor"},
    "muon": {"optimizer": "muon", "momentum": 0.9},
}  # fmt: skip


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Tanh())
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x))


def net():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Net()


INVERTED = TensorDataset(X, 1 - DATA.tensors[1])  # its loss rises while the model learns
CUT = 5


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)


PLATEAU = {
    "optimizer": "sgd", "learning_rate": 0.1, "scheduler": plateau, "monitor": "val_loss", "validate_every_n_steps": 2
}  # fmt: skip


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield from DATA


def logging_trainer(**settings):
    def step(model, batch):
        x, y = batch
        trainer.log("step_mean", x[:, 0].mean())
        trainer.log("step_sum", len(x), reduce="sum")
        trainer.log("step_max", x.max(), reduce="max")
        return cross_entropy(model(x), y)

    settings = {**BASE, "epochs": 1, "optimizer": "sgd", **settings}
    trainer = Trainer(net, training_step=step, callbacks=[LogsInHooks()], **settings)
    return trainer


def train(case, out, **settings):
    """Train a case and write its results. All ranks call it."""
    seen = {}
    if case == "logged":
        trainer = logging_trainer(**settings)
        history = trainer.fit(DATA)
    elif case == "by-the-clock":
        endless = {"epochs": 10**4, "log_every_n_steps": 10**6, "validate_every_s": 0.01}
        trainer = Trainer(net, optimizer="sgd", callbacks=[StopsAfterThree()], **{**BASE, **endless, **settings})
        history = trainer.fit(DATA, DATA)
    elif case == "evaluated":  # the settings of "adam"
        evaluates = Evaluates(DATA)
        trainer = Trainer(net, callbacks=[evaluates], **BASE, **OPTIMIZERS["adam"], **settings)
        history = trainer.fit(DATA)
        seen["evaluated"] = evaluates.evaluated
    elif case == "saved":
        asks = AsksToSave()
        trainer = Trainer(net, optimizer="sgd", callbacks=[asks], **{**BASE, "epochs": 10**4, **settings})
        history = trainer.fit(DATA)
        seen["saved"] = asks.saved
    elif case == "plateau":
        settings = {**BASE, **PLATEAU, **settings}
        source = out / "plateau-source"
        Trainer(net, **settings, max_steps=CUT, checkpoint_dir=str(source)).fit(DATA, INVERTED)
        (checkpoint,) = source.rglob(f"step-{CUT:08d}")
        resumed = Trainer(net, **settings, resume_from_checkpoint=str(checkpoint))
        resumed.fit(DATA, INVERTED)
        resumed.save(out / "plateau-resumed.safetensors")
        trainer = Trainer(net, **settings)
        history = trainer.fit(DATA, INVERTED)
    elif case == "arrays":  # as users of Keras call it
        settings = {**BASE, **settings}
        trainer = Trainer(net, optimizer="adam", loss_fn="cross_entropy", metrics=["accuracy"], **settings)
        x, y = (column.numpy() for column in DATA.tensors)
        history = trainer.fit(x=x[:33], y=y[:33], validation_data=(x[33:], y[33:]), epochs=3)
        seen["predicted"] = trainer.predict(x[33:]).tolist()
    elif case == "stream":
        trainer = Trainer(net, optimizer="sgd", **{**BASE, "max_steps": 10, "validate_every_n_steps": 3, **settings})
        history = trainer.fit(Endless(), DATA)
    else:
        trainer = Trainer(net, **BASE, **OPTIMIZERS[case], **settings)
        history = trainer.fit(DATA)
    trainer.save(out / f"{case}.safetensors")
    write(out, case, history, **seen)
    if trainer.is_main_process:
        found = {"rows": history.rows, "run_dir": str(Path(history.run_dir).absolute())}
        (out / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[3:]:
        train(name, Path(sys.argv[1]), dtype=sys.argv[2])
