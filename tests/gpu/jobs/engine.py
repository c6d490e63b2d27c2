"""A worker under any engine: train, stop and resume."""

from __future__ import annotations

from gpu_support import Net, checkpoint, data, sgd

from distributed import Trainer


def fit(name, model, **settings):
    ours = Trainer(model, optimizer=sgd, **settings)
    history = ours.fit(data())
    ours.save(f"{name}.safetensors")
    return history


fit("weights", Net(has_norm=True), epochs=2, gradient_clipping=0.5)
fit("straight", Net(dropout=0.3), max_steps=12)
kept = checkpoint(fit("halted", Net(dropout=0.3), max_steps=5))
fit("resumed", Net(dropout=0.3), max_steps=12, resume_from_checkpoint=str(kept))
