"""002's fault-tolerant checkpoints in a plain script: with an argument it fails in the second epoch, without one it goes on."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset

from distributed import Callback
from tests.seeds.running import run


class Fail(Callback):
    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step == 6:
            raise RuntimeError("on purpose")


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(128, 4, generator=generator), torch.randint(0, 2, (128,), generator=generator))
trainer = run("002/fault_tolerance.py", model=torch.nn.Linear(4, 2))["trainer"]
trainer.callbacks += [Fail()] * len(sys.argv[1:])
history = trainer.fit(data, epochs=3)
print(json.dumps({"steps": history.steps, "rows": [row["step"] for row in history.rows]}))
