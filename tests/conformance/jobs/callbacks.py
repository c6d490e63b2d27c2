"""Train with callbacks that the package ships, whole and cut off and resumed: callbacks.py OUT DTYPE [sharded].

OUT gets CASE.safetensors for the cases "whole", "cut-off" and "resumed" (averaged weights) and "frozen", "frozen-cut-off" and
"frozen-resumed", and run_dirs.json, the run directories by case. The run directory of "resumed" gets remembered-RANK.json. With
"sharded", averages and frozen parameters are left out, which ZeRO 1 to 3 refuses.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.callbacks import (
    DeviceStats,
    Freeze,
    GradientHistogram,
    ModelSummary,
    SampleImages,
    SampleText,
    ThroughputAndMFU,
    WeightAveraging,
)

SAMPLES, GLOBAL, CUT_OFF = 26, 8, 5  # four updates per epoch
FROZEN_UNTIL, FROZEN_CUT_OFF = 5, 3
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sigmoid().reshape(SAMPLES, 1, 2, 3))
BASE = {
    "epochs": 2, "global_batch_size": GLOBAL, "optimizer": "adam", "learning_rate": 0.05, "device": "cpu",
    "loss_fn": mse_loss, "tensorboard": True, "seed": 3, "log_every_n_steps": 1,
}  # fmt: skip


def net():
    """Return a model whose outputs are images of 2 x 3 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        parts = torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 6), torch.nn.Sigmoid()
        return torch.nn.Sequential(*parts, torch.nn.Unflatten(1, (1, 2, 3)))


def told(model, prompts):
    """Return texts that depend on all weights and on random numbers."""
    kind = next(model.parameters()).dtype
    return [f"{float(model(torch.randn(4, 6, dtype=kind)).sum()):.9f}" for _ in prompts]


class Remembers(Callback):
    """Keep a tensor and an array of this rank in checkpoints, and write what a resume gives back."""

    def __init__(self):
        self.kept, self.loaded = torch.zeros(2), None

    def on_step_end(self, state, result):
        self.kept = torch.tensor([state.step, self.context.worker.rank])

    def state_dict(self):
        return {"tensor": self.kept, "array": self.kept.numpy()}

    def load_state_dict(self, state):
        self.loaded = state

    def on_train_end(self, state):
        if self.loaded is not None:
            tensor, array = self.loaded["tensor"], self.loaded["array"]
            found = {"device": str(tensor.device), "tensor": tensor.tolist(), "array": array.tolist()}
            path = self.context.run_dir / f"remembered-{self.context.worker.rank}.json"
            path.write_text(json.dumps(found | {"types": [type(each).__name__ for each in (tensor, array)]}))


def trainer(averaged, **settings):
    callbacks = [
        *([WeightAveraging(0, every_n_steps=2)] if averaged else []), SampleImages(inputs=X[:2], every_n_steps=3), ModelSummary(),
        GradientHistogram(every_n_steps=4), SampleText(["sum"], generate=told, every_n_steps=2, name="told"), ThroughputAndMFU(),
        DeviceStats(), Remembers(),
    ]  # fmt: skip
    return Trainer(net, callbacks=callbacks, **BASE, **settings)


def freezing(**settings):
    return Trainer(net, callbacks=[Freeze("0.", until_step=FROZEN_UNTIL)], **BASE, **settings)


def cut_off_and_resume(out, make, prefix, step):
    """Train whole, and to `step` and from there. Yield (case, run directory)."""
    names = {
        "whole": prefix or "whole",
        "cut-off": f"{prefix}-cut-off".strip("-"),
        "resumed": f"{prefix}-resumed".strip("-"),
    }
    whole = make()
    yield names["whole"], whole.fit(DATA, DATA).run_dir
    whole.save(out / f"{names['whole']}.safetensors")
    first = make(max_steps=step)
    cut_off = first.fit(DATA, DATA).run_dir
    yield names["cut-off"], cut_off
    first.save(out / f"{names['cut-off']}.safetensors")
    resumed = make(resume_from_checkpoint=str(Path(cut_off, "checkpoints", f"step-{step:08d}")))
    yield names["resumed"], resumed.fit(DATA, DATA).run_dir
    resumed.save(out / f"{names['resumed']}.safetensors")


def train(out, *, sharded=False, **settings):
    """Train and write the results. All ranks call it."""
    run_dirs = dict(cut_off_and_resume(out, functools.partial(trainer, not sharded, **settings), "", CUT_OFF))
    if not sharded:
        run_dirs |= cut_off_and_resume(out, functools.partial(freezing, **settings), "frozen", FROZEN_CUT_OFF)
    if os.environ.get("RANK", "0") == "0":
        absolute = {name: str(Path(run_dir).absolute()) for name, run_dir in run_dirs.items()}
        (out / "run_dirs.json").write_text(json.dumps(absolute))


if __name__ == "__main__":
    train(Path(sys.argv[1]), dtype=sys.argv[2], sharded="sharded" in sys.argv)
