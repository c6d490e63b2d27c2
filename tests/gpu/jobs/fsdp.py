"""A worker under fsdp with its parameters in host memory: train in float64, resume, and train in fp16 and bf16."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from gpu_support import Net, checkpoint, data, sgd
from torch.nn.functional import cross_entropy

from distributed import Callback, Trainer


def in_pairs(outputs, targets):
    """Return a loss as (sum, count). The gradients in host memory are then scaled by a number on the GPU."""
    return cross_entropy(outputs, targets, reduction="sum"), float(len(targets))


def fit(name, model, **settings):
    ours = Trainer(model, optimizer=sgd, global_batch_size=48, **settings)
    history = ours.fit(data())
    ours.save(f"{name}.safetensors")
    return ours, history


class LeftOut(Callback):
    """Record which updates were skipped, and where the parameters are during training."""

    def __init__(self):
        self.steps, self.facts = [], {}

    def on_step_end(self, state, result):
        if result.skipped:
            self.steps.append(state.step)
        if self.facts:
            return
        local = [p.to_local() for p in ours_at_work[0].model.parameters()]
        self.facts["devices"] = sorted({p.device.type for p in local})
        self.facts["are_pinned"] = all(p.is_pinned() for p in local)
        self.facts["buffers"] = sorted({b.device.type for b in ours_at_work[0].model.buffers()})


ours_at_work: list[Trainer] = []
look = LeftOut()
whole = {"epochs": 2, "dtype": "float64", "gradient_clipping": 0.5, "loss_fn": in_pairs}
ours = Trainer(Net(has_norm=True), optimizer=sgd, global_batch_size=48, callbacks=[look], **whole)
ours_at_work.append(ours)
ours.fit(data())
ours.save("weights.safetensors")
seen = {"transport": str(dist.get_backend()), **look.facts}

fit("straight", Net(dropout=0.3), max_steps=12, epochs=2)
_, history = fit("halted", Net(dropout=0.3), max_steps=5)
fit("resumed", Net(dropout=0.3), max_steps=12, epochs=2, resume_from_checkpoint=str(checkpoint(history)))

for kind in ("fp16", "bf16"):
    scaler = {"scaler_init_scale": 2.0**24} if kind == "fp16" else {}
    look = LeftOut()
    model = Net()
    ours = Trainer(
        model, optimizer=sgd, global_batch_size=48, epochs=4, mixed_precision=kind, callbacks=[look], **scaler
    )
    ours_at_work[0] = ours
    history = ours.fit(data())
    losses = [row["loss"] for row in history.rows]
    is_finite = all(bool(p.isfinite().all()) for p in ours.model.parameters())
    seen[kind] = {"first": losses[0], "last": losses[-1], "is_finite": is_finite, "left_out": look.steps}

Path("facts-0.json").write_text(json.dumps(seen))
