"""Train a network of layers under every option of fsdp. Writes whole weights, and what each rank saw as RANK.json, into a directory."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, FSDPTrainer, PyTorchDDPTrainer
from distributed.testing.jobs.cases import freeze

OUT, BACKEND = Path(sys.argv[1]), sys.argv[2]
RANK = int(os.environ["RANK"])


class Layer(nn.Module):
    """Have a buffer that no checkpoint holds."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.rand(1), persistent=False)

    def forward(self, x):
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Have a last weight that is shared with the first."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)  # 11 rows and 7 columns, which are not divisible by two
        self.layers = nn.ModuleList([Layer(7), Layer(7)])
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.made_on = self.embed.weight.device.type

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Hidden(Net):
    """Have a tensor that is no parameter and no buffer."""

    def __init__(self):
        super().__init__()
        self.table = torch.arange(11.0, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) + 0.01 * self.table


class Normed(Net):
    """Have a BatchNorm, whose statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x):
        x = self.layers[0](self.embed(x))
        return self.head(self.layers[1](self.norm(x.transpose(1, 2)).transpose(1, 2)))


class Watch(Callback):
    """Inspect the model during training."""

    def on_step_end(self, state, result):
        self.skipped = [*getattr(self, "skipped", []), state.step] if result.skipped else getattr(self, "skipped", [])


def tokens():
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(0, 11, (37, 4), generator=generator)
    return TensorDataset(x, (x + 1) % 11)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


BASE = {"global_batch_size": 10, "epochs": 3, "learning_rate": 1e-2, "checkpoint_frequency": None, "seed": 2}
FLOAT64 = {"dtype": "float64", "gradient_clipping": 0.7, "gradient_accumulation_steps": 2}
CASES = {
    "layers": FLOAT64,
    "hidden": FLOAT64,
    "object": FLOAT64,
    "whole": FLOAT64 | {"fsdp": {"min_num_params": 10**6}},
    "classes": FLOAT64 | {"fsdp": {"wrap_classes": "Linear, LayerNorm"}},
    "size": FLOAT64 | {"fsdp": {"min_num_params": 100}},
    "kept": FLOAT64 | {"fsdp": {"reshard_after_forward": False}},
    "offload": FLOAT64 | {"fsdp": {"cpu_offload": True}},
    "recompute": FLOAT64 | {"activation_checkpointing": True},
    "bf16": {"mixed_precision": "bf16"},
    "bf16-normed": {"mixed_precision": "bf16"},
    "bf16-sums": {"mixed_precision": "bf16", "fsdp": {"reduce_dtype": "bfloat16"}},
    "fp16": {"mixed_precision": "fp16", "scaler_init_scale": 1024.0},  # no update overflows
    "overflow": {"mixed_precision": "fp16", "scaler_init_scale": 2.0**60},
    "nan": {"nan_policy": "skip"},
    "no-class": {"fsdp": {"wrap_classes": "Layers"}},
    "used-optimizer": {},
}


def run(name, settings):
    fsdp = settings.pop("fsdp", {}) if BACKEND == "fsdp" else settings.pop("fsdp", {}) and {}
    torch.manual_seed(1)
    model = {"hidden": Hidden, "bf16-normed": Normed}.get(name, Net)
    optimizer = None
    if (
        model is Normed
    ):  # Adam would make whole steps of what rounding leaves of a gradient of zero, that of a bias before the norm
        optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    if name in ("object", "used-optimizer"):
        model = Net()
        optimizer = optimizer_of(model)
    if name == "used-optimizer":
        loss(model(tokens()[:4][0]), tokens()[:4][1]).backward()
        optimizer.step()
    watch = Watch()

    def poisoned(outputs, targets):
        value = loss(outputs, targets)
        is_second = poisoned.calls == 1
        poisoned.calls += 1
        return value * float("nan") if is_second and RANK == 1 else value

    poisoned.calls = 0
    cls = FSDPTrainer if BACKEND == "fsdp" else PyTorchDDPTrainer
    trainer = cls(
        model, optimizer=optimizer, loss_fn=poisoned if name == "nan" else loss, callbacks=[watch], log_every_n_steps=1,
        **BASE | settings, **fsdp,
    )  # fmt: skip
    before = trainer.evaluate(tokens())["loss"]
    history = trainer.fit(tokens(), tokens())
    net = trainer.model
    seen = {
        "before": before,
        "loss": [row["loss"] for row in history.rows],
        "val_loss": history.rows[-1]["val_loss"],
        "predicted": trainer.predict(tokens()).double().sum().item(),
        "skipped": watch.skipped,
        "made_on": net.made_on,
        "on": net.layers[0].scale.item(),
    }
    with trainer.backend.as_trained():
        seen["sharded"] = [
            name for name, module in net.named_modules() if hasattr(module, "set_requires_gradient_sync")
        ]
        seen["held"] = sum(getattr(p, "_local_tensor", p).numel() for p in net.parameters())
        if BACKEND == "fsdp" and settings.get("dtype"):
            with torch.no_grad():
                net(tokens()[:2][0])
            seen["gathered"] = not hasattr(net.layers[0].up.weight, "placements")
    trainer.save(OUT / f"{name}.safetensors")
    return seen


def main():
    found = {}
    for name, settings in CASES.items():
        try:
            found[name] = run(name, dict(settings))
        except ConfigError as error:
            found[name] = {"error": str(error)}
        if len(found) == 1:
            freeze()  # do not collect what the first fit imported
    (OUT / f"{RANK}.json").write_text(json.dumps(found))


main()
