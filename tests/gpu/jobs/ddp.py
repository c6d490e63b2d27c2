"""A worker under pytorch-ddp: train, resume and use the collectives. Each rank writes what it saw."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpu_support import REHEARSAL, During, Net, SyncMode, checkpoint, data, sgd

from distributed import Trainer

rank = int(os.environ["RANK"])


def fit(name: str, model: torch.nn.Module, **settings):
    ours = Trainer(model, optimizer=sgd, **settings)
    history = ours.fit(data())
    ours.save(f"{name}.safetensors")
    return ours, history


ours, _ = fit("weights", Net())
backend = ours.backend
seen = {
    "rank": rank,
    "transport": str(dist.get_backend()),
    "device": str(backend.device),
    "reduced": backend.world.reduce({"value": 3.0}),
    "gathered": backend.world.gather({"rank": rank}),
    "given_out": backend.world.broadcast("word" if rank == 0 else None),
    "is_quiet": None,
}
backend.world.barrier()

# Stop and resume, with dropout on every rank's own stream.
fit("straight", Net(dropout=0.3), max_steps=12)
_, history = fit("halted", Net(dropout=0.3), max_steps=5)
fit("resumed", Net(dropout=0.3), max_steps=12, resume_from_checkpoint=str(checkpoint(history)))

# NCCL's exchange does not make the host wait; an epoch has eight updates
if not REHEARSAL and dist.get_backend() == "nccl":
    fit("quiet", Net(), log_every_n_steps=1000, callbacks=[During(SyncMode("error"), 9, 15)])
    seen["is_quiet"] = True

Path(f"facts-{rank}.json").write_text(json.dumps(seen))
