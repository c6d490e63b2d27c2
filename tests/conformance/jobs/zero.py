"""Train on DeepSpeed, or on another backend as the reference, and write what each rank saw.

    zero.py OUT BACKEND

NAME.safetensors has the weights of each case, RANK.json the rest.
"""

import copy
import json
import math
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, Trainer
from distributed.testing.jobs.cases import freeze

SAMPLES, FEATURES, CLASSES = 101, 12, 5  # 101 is not divisible by 2 or 3


def net():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), Block(16), Block(16), nn.Linear(16, CLASSES))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x))


def data(ignored=False):
    """Return the data. With `ignored` the first 60 targets do not count, so that whole slices of an update have no targets."""
    generator = torch.Generator().manual_seed(7)
    x, y = (
        torch.randn(SAMPLES, FEATURES, generator=generator),
        torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
    )
    y[: 60 * ignored] = -100
    return TensorDataset(x, y)


def pair_loss(outputs, targets):
    """Return (sum, count) with a count that differs between slices."""
    weights = 1.0 + (targets % 3).to(outputs.dtype)
    return (nn.functional.cross_entropy(outputs, targets, reduction="none") * weights).sum(), weights.sum()


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


class Poisoned:
    """Compute a loss that is NaN in its third call on the last rank."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, targets):
        value = nn.functional.cross_entropy(outputs, targets)
        self.calls += outputs.requires_grad
        is_mine = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        return value * math.nan if self.calls == 3 and is_mine and outputs.requires_grad else value


class Watch(Callback):
    """Inspect the model and the optimizer during training."""

    def __init__(self):
        self.trainer, self.skipped, self.norms, self.kinds, self.held, self.state_held = None, [], [], [], [], []

    def on_step_end(self, state, result):
        if result.skipped:
            self.skipped.append(state.step)
        parameters = list(self.trainer.model.parameters())
        self.kinds.append(str(parameters[0].dtype))
        self.held.append(sum(p.numel() for p in parameters))
        slots = self.trainer.backend.optimizer.state.values()
        self.state_held.append(
            sum(v.numel() for slot in slots for v in slot.values() if torch.is_tensor(v) and v.dim())
        )

    def on_log(self, state, split, metrics):
        if "grad_norm" in metrics:
            self.norms.append(metrics["grad_norm"])


torch.set_num_threads(1)  # threads that wait for each other on a busy machine cost seconds in each fit
BASE = {"epochs": 2, "global_batch_size": 22, "checkpoint_frequency": None, "seed": 3, "log_every_n_steps": 1}
SGD = {"optimizer": sgd, "scheduler": schedule, "warmup_steps": 4, "gradient_clipping": 0.5}
ADAM = {"learning_rate": 1e-2, "gradient_accumulation_steps": 2}
# Cases for every stage. STAGES has the settings that only DeepSpeed has.
CASES = {
    "sgd": SGD,
    "sgd-accumulated": SGD | {"gradient_accumulation_steps": 3},
    "sgd-pair": SGD | {"loss_fn": pair_loss, "gradient_accumulation_steps": 2},
    "sgd-ignored": SGD | {"ignored": True, "gradient_accumulation_steps": 2},
    "sgd-nothing-counts": SGD | {"ignored": True, "global_batch_size": 7, "shuffle": False, "nan_policy": "skip"},
    "sgd-empty-slices": SGD | {"global_batch_size": 3, "gradient_accumulation_steps": 2, "max_steps": 20},
    "sgd-recomputed": SGD | {"activation_checkpointing": True},
    "sgd-nan": SGD | {"loss_fn": "poisoned", "nan_policy": "skip"},
    "adam": ADAM,
    "adam-clipped": ADAM | {"gradient_clipping": 0.3},
}
ALL_CUT = {"deepspeed_config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
STAGES = {"zero-0": {"zero_stage": 0}, "zero-1": {"zero_stage": 1}, "zero-2": {}, "zero-3": ALL_CUT}
OFFLOADED = {
    "offload-1": {"zero_stage": 1, "offload_optimizer": True},
    "offload-2": {"zero_stage": 2, "offload_optimizer": True},
    "offload-3": {"offload_optimizer": True, "offload_param": True, **ALL_CUT},
}
MEASURED = ("sgd-pair", "adam-clipped")
OWN = {
    "train_batch_size": 22, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.3, "steps_per_print": 1, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.99], "eps": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 200, "allgather_bucket_size": 100, "overlap_comm": False},
}  # fmt: skip


def by_hand(params):
    """Return the optimizer that OWN asks for."""
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)


def leftovers(model):
    """Return what DeepSpeed put on the parts of a model and did not remove."""
    return sorted(
        {name for p in model.parameters() for name in vars(p)}
        | {name for module in model.modules() for name in vars(module) if "ds_" in name}
    )


def run(name, settings, out, model=net):
    settings = BASE | settings
    measured, watch = data(settings.pop("ignored", False)), Watch()
    if settings.get("loss_fn") == "poisoned":
        settings["loss_fn"] = Poisoned()
    trainer = watch.trainer = Trainer(model, callbacks=[watch], **settings)
    history = trainer.fit(measured, data())
    seen = {
        "loss": [row["loss"] for row in history.rows], "val_loss": history.rows[-1]["val_loss"], "steps": history.steps,
        "again": trainer.evaluate(data())["loss"], "predicted": trainer.predict(data()).double().sum().item(),
        "skipped": watch.skipped, "norms": watch.norms, "kinds": watch.kinds, "held": watch.held, "state_held": watch.state_held,
        "after": [str(p.dtype) for p in trainer.model.parameters()],
        "plain": sum(p.numel() for p in trainer.model.parameters()),
        "left": leftovers(trainer.model),
    }  # fmt: skip
    trainer.save(out / f"{name}.safetensors")
    if name == next(iter(CASES)) or name == f"{next(iter(STAGES))}-{next(iter(CASES))}":
        freeze()  # do not collect what the first fit imported
    return seen, trainer


def reference(out):
    """Train on one process of `single`. NAME-cut repeats a case with its batches split differently, which shows the rounding of fp32."""
    found = {}
    for name, case in (
        CASES | {"own": ADAM | {"optimizer": by_hand, "gradient_clipping": 0.3, "gradient_accumulation_steps": 1}}
    ).items():
        case = {key: value for key, value in case.items() if not (name == "own" and key == "learning_rate")}
        found[name], _ = run(name, case, out)
        if name in MEASURED:
            more = case.get("gradient_accumulation_steps", 1) * 3
            run(f"{name}-cut", case | {"gradient_accumulation_steps": more}, out)
    found["bf16"], _ = run("bf16", ADAM | {"mixed_precision": "bf16"}, out)
    return found


def stages(out):
    """Train on DeepSpeed: all cases on two processes, and on other numbers the cases that depend on the number."""
    found = {}
    is_two = os.environ["WORLD_SIZE"] == "2"
    for stage, options in (STAGES | OFFLOADED).items():
        for name, case in CASES.items():
            if (is_two and stage in STAGES) or name == "sgd-pair" or (is_two and name in MEASURED):
                found[f"{stage}/{name}"], _ = run(f"{stage}-{name}", case | {"deepspeed": options}, out)
        if stage != "zero-0" and is_two:
            found[f"{stage}/bf16"], _ = run(
                f"{stage}-bf16", ADAM | {"mixed_precision": "bf16", "deepspeed": options}, out
            )
    found["own"], _ = run("own", {"global_batch_size": None, "deepspeed": {"deepspeed_config": OWN}}, out)
    return found


class Frozen(nn.Module):
    """Train only one of two layers."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 7), nn.Linear(7, CLASSES)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(x))


def two_groups(params):
    first, *others = params
    return torch.optim.AdamW([{"params": [first], "lr": 1e-3, "weight_decay": 0.0}, {"params": others}], lr=1e-2)


SHAPES = (("frozen", Frozen, ADAM), ("groups", net, {"optimizer": two_groups}))


def special(out):
    """Run the cases that do not apply to every stage."""
    found = {}
    for stage in range(4):
        options = {"deepspeed": {"zero_stage": stage}}
        for name, model, optimizer in SHAPES:
            found[f"{name}-{stage}"], _ = run(f"{name}-{stage}", {**optimizer, **options}, out, model)
        found[f"twice-{stage}"] = twice(f"twice-{stage}", options, out)
    for name, refused in REFUSED.items():
        try:
            run(name, {k: v for k, v in refused.items() if k != "model"}, out, refused.get("model", net))
        except ConfigError as error:
            found[name] = {"error": str(error)}
    return found


class Neighbours(torch.optim.SGD):
    """Stand for an optimizer that the user wrote."""


def tempered():
    model = net()
    model.temperature = nn.Parameter(torch.tensor(1.0))
    return model


REFUSED = {
    "own-optimizer": {"optimizer": lambda params: Neighbours(params, lr=0.1)},
    "adagrad": {"optimizer": lambda params: torch.optim.Adagrad(params)},
    "halves": {"model": lambda: net().bfloat16()},
    "scalar": {"model": tempered, "deepspeed": {"zero_stage": 0}},
    "bad-value": {
        "deepspeed": {"deepspeed_config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}}
    },
    "two-optimizers": {"optimizer": sgd, "deepspeed": {"deepspeed_config": {"optimizer": {"type": "AdamW"}}}},
}


def twice(name, options, out):
    """Train one epoch, and then another in a second fit."""
    trainer = Trainer(net, **BASE | ADAM | options | {"epochs": 1})
    trainer.fit(data())
    trainer.fit(data(), epochs=1)
    trainer.save(out / f"{name}.safetensors")
    return {}


def main(out, backend):
    found = reference(out) if backend == "single" else stages(out)
    if os.environ.get("WORLD_SIZE") == "2":
        found |= special(out)
    if backend == "single":
        for name, model, optimizer in SHAPES:
            found[name], _ = run(name, optimizer, out, model)
    (out / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), copy.copy(sys.argv[2]))
