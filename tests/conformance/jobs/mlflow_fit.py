"""Fit a small problem for the tests of the MLflow logger. Environment: KILL_AT, WAIT."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from distributed.loggers import Image


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class Beside(Callback):
    """Log a picture, log to MLflow from the last rank, die once, and keep the seconds of the longest step."""

    def __init__(self):
        self.last, self.longest = None, 0.0

    def on_step_end(self, state, result):
        now = time.perf_counter()
        if self.last is not None:
            self.longest = max(self.longest, now - self.last)
        self.last = now
        if state.step == int(os.environ.get("KILL_AT", "-1")) and not Path("killed").exists() and is_last():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, state, metrics):
        self.context.log("picture", Image(torch.arange(12, dtype=torch.uint8).reshape(3, 4)))

    def on_train_end(self, state):
        if is_last() and "mlflow" in sys.argv:
            import mlflow

            assert os.environ["RANK"] == "1"
            mlflow.log_metric("from_rank_1", 7.0)
        Path(f"longest-{os.environ.get('RANK', 0)}").write_text(str(self.longest))


def is_last():
    return int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1


for name, value in (item.split("=") for item in sys.argv[1:] if "=" in item):
    module, _, constant = name.rpartition(".")
    __import__(f"distributed.loggers.{module}")
    setattr(sys.modules[f"distributed.loggers.{module}"], constant, float(value))

generator = torch.Generator().manual_seed(0)
x = torch.randn(64, 4, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer = Trainer(Net(), {"lr": 1e-2, "flavour": "mild"}, batch_size=4, log_every_n_steps=1, callbacks=[Beside()])
trainer.fit(data, data)
