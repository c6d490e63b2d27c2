"""Trains every case of the comparison in one process group and writes the final weights: NAME.npz under the directory given."""

import sys
from pathlib import Path

import numpy
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from distributed import Trainer

SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 divides by none of 2, 3, 4


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


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
    "fp32": {"dtype": "float32"},
}


def main(out: Path) -> None:
    for name, case in CASES.items():
        settings = BASE | case
        source = Stream() if settings.pop("data", None) else DataLoader(data(), batch_size=1, shuffle=True)
        optimizer_case = {"learning_rate": settings["learning_rate"]}
        trainer = Trainer(model, **(settings | optimizer_case))
        history = trainer.fit(source, data())
        again = trainer.evaluate(data())
        if trainer.is_main_process:
            weights = {key: value.numpy() for key, value in trainer.model.state_dict().items()}
            numbers = {
                "history.val_loss": history.rows[-1]["val_loss"],
                "history.loss": history.rows[-1]["loss"],
                "again": again["loss"],
                "steps": history.steps,
            }
            numbers["first_loss"] = history.rows[0]["loss"]
            numpy.savez(out / f"{name}.npz", **weights, **numbers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
