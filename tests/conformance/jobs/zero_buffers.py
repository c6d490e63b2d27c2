"""Train a model with buffers on DeepSpeed in 16 and in 32 bits, and write the resulting buffers: zero_buffers.py OUT"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.ds_ratio = 2.0  # has the prefix of the attributes that DeepSpeed makes
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 8))
        self.register_buffer("lowest", torch.full((1,), torch.finfo(torch.float32).min))

    def forward(self, x):
        return self.last(self.norm(self.first(x)) * self.scale * self.ds_ratio).maximum(self.lowest)


class Watch(Callback):
    def __init__(self):
        self.trainer, self.kinds = None, set()

    def on_step_end(self, state, result):
        self.kinds |= {str(b.dtype) for b in self.trainer.model.buffers() if b.is_floating_point()}


def run(stage, precision, out):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
    watch = Watch()
    trainer = watch.trainer = Trainer(
        Net, mixed_precision=precision, deepspeed={"zero_stage": stage}, global_batch_size=8, max_steps=3, callbacks=[watch],
        loss_fn=nn.functional.mse_loss, checkpoint_frequency=None,
    )  # fmt: skip
    trainer.fit(data)
    trainer.save(out / f"{stage}-{precision}.safetensors")
    found = trainer.model.state_dict()
    return {
        "in training": sorted(watch.kinds),
        "after": sorted({str(tensor.dtype) for tensor in found.values() if tensor.is_floating_point()}),
        "lowest": found["lowest"].item(),
        "scale": found["scale"].tolist(),
        "statistics": [*found["norm.running_mean"].tolist(), *found["norm.running_var"].tolist()],
        "val_loss": trainer.evaluate(data)["loss"],
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    seen = {f"{stage}-{precision}": run(stage, precision, out) for stage in (1, 2, 3) for precision in ("no", "bf16")}
    (out / "seen.json").write_text(json.dumps(seen))
