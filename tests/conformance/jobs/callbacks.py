"""Train with callbacks that the package ships, whole and cut off and resumed: callbacks.py OUT.

OUT gets whole.safetensors and resumed.safetensors, the averaged weights, and run_dirs.json, the run directories by case.
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from distributed import Trainer
from distributed.callbacks import GradientHistogram, ModelSummary, SampleImages, WeightAveraging

SAMPLES, GLOBAL, CUT_OFF = 26, 8, 5  # four updates per epoch
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sigmoid().reshape(SAMPLES, 1, 2, 3))
BASE = {
    "epochs": 2, "global_batch_size": GLOBAL, "optimizer": "adam", "learning_rate": 0.05, "dtype": "float64", "device": "cpu",
    "loss_fn": mse_loss, "tensorboard": True, "seed": 3,
}  # fmt: skip


def net():
    """Return a model whose outputs are images of 2 x 3 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        parts = torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 6), torch.nn.Sigmoid()
        return torch.nn.Sequential(*parts, torch.nn.Unflatten(1, (1, 2, 3)))


def trainer(**settings):
    callbacks = [
        WeightAveraging(0, every_n_steps=2), SampleImages(inputs=X[:2], every_n_steps=3), ModelSummary(),
        GradientHistogram(every_n_steps=4),
    ]  # fmt: skip
    return Trainer(net, callbacks=callbacks, **BASE, **settings)


def train(out, **settings):
    """Train and write the results. All ranks call it."""
    whole = trainer(**settings)
    run_dirs = {"whole": whole.fit(DATA, DATA).run_dir}
    whole.save(out / "whole.safetensors")
    run_dirs["cut-off"] = trainer(max_steps=CUT_OFF, **settings).fit(DATA, DATA).run_dir
    checkpoint = Path(run_dirs["cut-off"], "checkpoints", f"step-{CUT_OFF:08d}")
    resumed = trainer(resume_from_checkpoint=str(checkpoint), **settings)
    run_dirs["resumed"] = resumed.fit(DATA, DATA).run_dir
    resumed.save(out / "resumed.safetensors")
    if whole.is_main_process:
        absolute = {name: str(Path(run_dir).absolute()) for name, run_dir in run_dirs.items()}
        (out / "run_dirs.json").write_text(json.dumps(absolute))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
