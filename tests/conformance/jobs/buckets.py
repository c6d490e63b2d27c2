"""Train a model of several DDP buckets on three processes. Rank 1 is killed once at the step given. Writes the final weights.

Arguments: the path for the weights, the step, and options of DDP as JSON.
"""

import json
import os
import signal
import sys

import numpy
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer


class KillOnce(Callback):
    def on_step_end(self, state, result):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and os.environ["RANK"] == "1" and state.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)


def model():
    layers = [
        torch.nn.Linear(8, 700),
        torch.nn.ReLU(),
        torch.nn.Linear(700, 700),
        torch.nn.ReLU(),
        torch.nn.Linear(700, 3),
    ]
    return torch.nn.Sequential(*layers)


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(203, 8, generator=generator), torch.randint(0, 3, (203,), generator=generator))
trainer = Trainer(
    model,
    epochs=2,
    batch_size=8,
    checkpoint_every_n_steps=3,
    callbacks=[KillOnce()],
    ddp={"bucket_cap_mb": 0.5, **json.loads(sys.argv[3])},
)
trainer.fit(data)
if trainer.is_main_process:
    numpy.savez(sys.argv[1], **{name: value.numpy() for name, value in trainer.model.state_dict().items()})
