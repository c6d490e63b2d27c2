"""Train with a user's script that has everything that makes a resume hard, under faults from outside of the script.

    resume.py OUT NUM_WORKERS FAULTS

FAULTS is a JSON list; the n-th is armed in the n-th attempt (those before it are over). Each is [kind, number, rank]:
"step" kills after that update, "validation" at that validation sample, "data" at that training sample, "save" at that
fsync of the attempt, "forward" in that training step. "launcher-step" and so on strike the launcher instead of the rank,
"TERM-step" sends SIGTERM, and "loop-step" loops for ever.
OUT gets `samples-RANK.jsonl`, for each update the samples that this rank used, and `faults.txt`, when they struck.
With LOGGER in the environment, OUT also gets `logged.jsonl`, what a logger of the script got: [attempt, step or status, metrics]. With
SHOWN, histograms are also written after every fifth update, and the GPUs are read.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, Logger, Trainer
from distributed.callbacks import DeviceStats, GradientHistogram
from distributed.checkpoints import digests

digests.LARGE_BYTES = (
    1  # each tensor is a part of its file, which a resume verifies while it reads it, as it does large ones
)
SAMPLES, FEATURES, CLASSES = 103, 12, 5
OUT, NUM_WORKERS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
DTYPE = torch.float64 if "--float64" in sys.argv else torch.float32
SLOW = float(os.environ.get("SLOW", 0))  # seconds of each micro-batch, so that a signal arrives before the end
RANK, MAIN, LAUNCHER = int(os.environ.get("RANK", 0)), os.getpid(), os.getppid()
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Armed:
    """Hold the fault of this attempt."""

    def __init__(self):
        kind, self.number, rank = FAULTS[ATTEMPT] if len(FAULTS) > ATTEMPT else ("", 0, -1)
        *whom, self.kind = kind.split("-")
        self.is_mine = rank == RANK
        self.to_launcher, self.loops = "launcher" in whom, "loop" in whom
        self.signum = next((getattr(signal, f"SIG{name}") for name in whom if name.isupper()), signal.SIGKILL)
        self.counts = {}

    def pass_(self, kind, number=None):
        """Strike if the fault is due here. Called at every place where a fault may strike."""
        if kind != self.kind or not self.is_mine:
            return
        self.counts[kind] = self.counts.get(kind, 0) + 1 if number is None else number
        if self.counts[kind] == self.number:
            with (OUT / "faults.txt").open("a") as file:
                file.write(f"{time.time()}\n")
            while self.loops:
                time.sleep(0.01)
            os.kill(LAUNCHER if self.to_launcher else MAIN, self.signum)
            if self.to_launcher and self.signum == signal.SIGKILL:
                signal.pause()


armed = Armed()
fsync = os.fsync
os.fsync = lambda fd: (armed.pass_("save"), fsync(fd))


class Augmented(Dataset):
    """Draw from every generator for each sample."""

    def __init__(self, size, kind):
        generator = torch.Generator().manual_seed(size)
        self.x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64).to(DTYPE)
        self.y = torch.randint(0, CLASSES, (size,), generator=generator)
        self.kind = kind

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        armed.pass_(self.kind)
        x = self.x[index] + 0.1 * torch.randn(FEATURES, dtype=DTYPE)
        return x * random.uniform(0.9, 1.1) + float(numpy.random.normal()), self.y[index], index


class Watch(Callback):
    """Record the samples of each update, and then let the fault strike."""

    used: ClassVar[list] = []

    def on_train_start(self, state):
        self.file = (OUT / f"samples-{RANK}.jsonl").open("a", buffering=1)

    def on_step_end(self, state, result):
        self.file.write(json.dumps([state.epoch, state.step, self.used]) + "\n")
        self.used.clear()
        armed.pass_("step", state.step)


class Lines(Logger):
    """Write each call. The first attempt hangs in the fourth one, so that a kill finds calls in the queue."""

    def open(self, run):
        self.file, self.count = (OUT / "logged.jsonl").open("a", buffering=1), 0

    def log_metrics(self, step, metrics):
        self.count += 1
        if ATTEMPT == 0 and self.count == 4:
            threading.Event().wait()
        self.file.write(json.dumps([ATTEMPT, step, metrics]) + "\n")

    def close(self, status):
        self.file.write(json.dumps([ATTEMPT, status, {}]) + "\n")
        self.file.close()


def step(model, batch):
    x, y, index = batch
    if model.training:
        Watch.used += index.tolist()
        time.sleep(SLOW)
        armed.pass_("forward")
    return torch.nn.functional.cross_entropy(model(x), y)


dropout = 0.0 if "--float64" in sys.argv else 0.2
torch.manual_seed(11)
model = torch.nn.Sequential(
    torch.nn.Linear(FEATURES, 24), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(24, CLASSES)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=21)
trainer = Trainer(
    model,
    optimizer=optimizer,
    scheduler=scheduler,
    training_step=step,
    gradient_clipping=0.5,
    callbacks=[Watch(), *([GradientHistogram(every_n_steps=5), DeviceStats()] if "SHOWN" in os.environ else [])],
    loggers=[Lines()] if "LOGGER" in os.environ else (),
    **json.loads(os.environ.get("SETTINGS", "{}")),
)
loader = DataLoader(Augmented(SAMPLES, "data"), batch_size=4, shuffle=True, num_workers=NUM_WORKERS)
history = trainer.fit(loader, DataLoader(Augmented(19, "validation"), batch_size=4, num_workers=NUM_WORKERS))
