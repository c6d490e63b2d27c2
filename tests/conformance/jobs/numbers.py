"""Trains every case of the comparison in one process group and writes the final weights: NAME.npz under the directory given."""

import os
import sys
from pathlib import Path

import numpy
import torch
from safetensors.numpy import load_file
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Callback, Trainer

WORLD = int(os.environ.get("WORLD_SIZE", 1))
SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 divides by none of 2, 3, 4


def data(dtype=torch.float64, ignored=0):
    """The first 60 of every hundred targets are ignored if asked for: whole slices of an update have none left."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    y[: ignored and 60] = -100
    return TensorDataset(x, y)


def model():
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, CLASSES))


def pair_loss(outputs, targets):
    """Weighted by a count that differs from slice to slice."""
    weights = 1.0 + (targets % 3).to(outputs.dtype)
    losses = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (losses * weights).sum(), weights.sum()


def unreduced(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


class Stream(IterableDataset):
    def __iter__(self):
        yield from (data()[i] for i in range(SAMPLES))


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


BASE = {
    "epochs": 3,
    "dtype": "float64",
    "global_batch_size": 22,
    "learning_rate": 1e-2,
    "checkpoint_frequency": None,
    "seed": 3,
}
CASES = {
    "adamw": {},
    "sgd-schedule-clip": {"optimizer": sgd, "scheduler": schedule, "gradient_clipping": 0.5, "warmup_steps": 4},
    "accumulation": {"gradient_accumulation_steps": 3},
    "accumulation-clip": {"gradient_accumulation_steps": 2, "optimizer": sgd, "gradient_clipping": 0.1},
    "sum-count": {"loss_fn": pair_loss, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
    "unreduced": {"loss_fn": unreduced},
    "tiny-last": {"global_batch_size": 50, "gradient_accumulation_steps": 2},  # a last update of one sample
    "stream": {"data": "stream"},
    "class-weights": {
        "loss_fn": torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.5, 2.0, 1.5]), label_smoothing=0.1),
        "gradient_accumulation_steps": 2,
    },
    "ignored": {"data": "ignored", "gradient_accumulation_steps": 2, "gradient_clipping": 0.5},
    "empty-slices": {
        "global_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 40,
    },  # fewer samples than slices
}
# In fp32 the measure is what one process itself moves when it cuts the same batch into as many slices.
FP32 = {"dtype": "float32", "epochs": 4, "optimizer": None}
for seed in range(4):
    CASES[f"fp32-{seed}"] = FP32 | {"seed": seed}
    if WORLD == 1:
        CASES |= {f"fp32-{seed}-cut-{n}": FP32 | {"seed": seed, "gradient_accumulation_steps": n} for n in (2, 3, 4)}


class FirstLoss(Callback):
    """The loss of the first update, over all ranks."""

    value = float("nan")

    def on_log(self, state, split, metrics):
        if split == "train" and state.step == 1:
            self.value = metrics["loss"]


def main(out: Path) -> None:
    for name, case in CASES.items():
        settings = BASE | case
        dtype = torch.float64 if settings["dtype"] == "float64" else torch.float32
        kind = settings.pop("data", None)
        measured = data(dtype, ignored=kind == "ignored")
        source = Stream() if kind == "stream" else DataLoader(measured, batch_size=1, shuffle=True)
        first = FirstLoss()
        trainer = Trainer(model, callbacks=[first], log_every_n_steps=1, **settings)
        history = trainer.fit(source, measured)
        again = trainer.evaluate(measured)
        predicted = trainer.predict(data(dtype))
        trainer.save(out / f"{name}.safetensors")  # whole on every backend; trainer.model may hold this rank's part
        if trainer.is_main_process:
            weights = load_file(out / f"{name}.safetensors")
            numpy.savez(
                out / f"{name}.npz", **weights, predicted=predicted.numpy(), val_loss=history.rows[-1].get("val_loss", 0.0) if history.rows else 0.0,
                loss=[row["loss"] for row in history.rows], again=again["loss"], accuracy=again["accuracy"], steps=history.steps, first=first.value,
            )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
