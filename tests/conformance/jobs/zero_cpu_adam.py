"""Compare DeepSpeed's C++ Adam, with the lock of a killed build left behind, with torch's Adam. Writes OUT/RANK.json."""

import json
import os
import sys
from pathlib import Path

import torch

from distributed import Trainer
from distributed.backends._deepspeed import operators
from tests.conformance.jobs import zero

OUT = Path(sys.argv[1])
os.environ.pop("TORCH_EXTENSIONS_DIR", None)
lock = operators.directory()[0] / "cpu_adam" / "lock"
lock.parent.mkdir(parents=True, exist_ok=True)
lock.touch()
found = {"had_lock": lock.exists()}


def weights(**options):
    trainer = Trainer(
        zero.net, **zero.BASE | zero.ADAM, deepspeed={"zero_stage": 2, "offload_optimizer": True, **options}
    )
    trainer.fit(zero.data())
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


found["moved"] = (weights(cpu_adam=True) - weights()).abs().max().item()
found["has_lock"] = lock.exists()
(OUT / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
