"""Train several models with an optimizer each: whole, cut off and resumed, with empty slices, and with errors.

Arguments: the directory for the results, the backend, and a checkpoint of another backend to continue from, if there is one. With
"mixed" in its place, the models are trained in float32 and with bf16 instead.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.errors import ConfigError

RANK = int(os.environ.get("RANK", 0))
SAMPLES, BATCH, EPOCHS, CUT = 101, 22, 2, 7
CLIP, WARM = 0.2, 3
BASE = {
    "epochs": EPOCHS, "global_batch_size": BATCH, "dtype": "float64", "shuffle": False, "gradient_clipping": CLIP,
    "warmup_steps": WARM, "gradient_accumulation_steps": 2, "checkpoint_frequency": None,
}  # fmt: skip


class Critic(nn.Module):
    """Critic with a buffer that enters its results."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.layers(x) * self.scale[0]


def generator():
    return nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))


MODELS = {"g": generator, "d": Critic, "teacher": lambda: nn.Linear(3, 4)}


def data():
    drawn = torch.Generator().manual_seed(7)
    real = torch.randn(SAMPLES, 4, generator=drawn, dtype=torch.float64)
    return TensorDataset(real, torch.randn(SAMPLES, 3, generator=drawn, dtype=torch.float64))


def step(models, batch, update):
    """Update the critic twice, then the generator, then the critic with outputs of the old generator."""
    real, noise = batch
    fake = models["g"](noise)
    weight = 1.0 + (noise[:, :1] > 0)
    for name in ("d", "d", "g", "d"):
        if name == "g":
            wanted = models["teacher"](noise)
            update("g", softplus(-models["d"](fake)).mean() + (fake - wanted).square().mean())
        else:
            each = softplus(-models["d"](real)) + softplus(models["d"](fake.detach()))
            update("d", ((each * weight).sum(), weight.sum()))
    return {"loss": each.mean()}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


class OtherBuffers(Callback):
    """Change the buffers of all ranks but rank 0, whose values count."""

    def on_step_end(self, state, result):
        self.context.model["d"].scale.add_(RANK)


def train_one(out, backend, name, **settings):
    """Train a case and write its results."""
    samples = data()
    if settings.get("dtype") == "float32":
        samples = TensorDataset(*(column.float() for column in samples.tensors))
    given = {
        "models": MODELS, "optimizers": {"g": adam, "d": sgd}, "schedulers": {"d": halving}, "training_step": step,
        **BASE, **settings,
    }  # fmt: skip
    trainer = Trainer(**given)
    trainer.callbacks = [OtherBuffers()] if backend == "pytorch-ddp" else []
    history = trainer.fit(samples, samples)
    trainer.save(out / f"{name}.safetensors")
    again = trainer.evaluate(samples)
    if trainer.is_main_process:
        row = {key: value for key, value in history.rows[-1].items() if "second" not in key}
        (out / f"{name}.json").write_text(json.dumps({"row": row, "again": again}))


def mixed(out: Path, backend: str):
    """Train with plain gradients, which do not magnify rounding as those of Adam do."""
    settings = {"dtype": "float32", "optimizers": {"g": sgd, "d": sgd}}
    train_one(out, backend, "float32", **settings)
    train_one(out, backend, "bf16", **settings, mixed_precision="bf16")


def main(out: Path, backend: str, elsewhere: str | None):
    train = functools.partial(train_one, out, backend)

    def refused(**settings):
        try:
            train("refused", **settings)
        except ConfigError as error:
            return str(error)
        return None

    def differs(models, batch, update):
        name = "g" if RANK == 1 else "d"
        update(name, models[name](batch[1 if name == "g" else 0]).mean())

    def unused(models, batch, update):
        update("d", models["d"].layers[0](batch[0]).mean())

    train("whole")
    train("cut", max_steps=CUT, checkpoint_dir=str(out / "source"))
    (source,) = (out / "source").rglob(f"step-{CUT:08d}")
    train("resumed", resume_from_checkpoint=str(source))
    train("one-batch", gradient_accumulation_steps=1)
    train("empty", global_batch_size=3, max_steps=6)
    if elsewhere is not None:
        train("moved", resume_from_checkpoint=elsewhere)
    errors = {}
    if backend == "pytorch-ddp":  # the processes of fsdp exchange parameters before they compare their calls
        errors = {"differs": refused(training_step=differs), "unused": refused(training_step=unused)}
    (out / f"errors-{RANK}.json").write_text(json.dumps(errors))


if __name__ == "__main__" and "mixed" in sys.argv:
    mixed(Path(sys.argv[1]), sys.argv[2])
elif __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
