"""Train a Keras model with everything that makes a resume hard, under the faults of the other resume.py.

resume.py OUT - FAULTS
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import keras
import numpy

from distributed import Callback, TensorFlowDistributedTrainer
from distributed.checkpoints import digests

digests.LARGE_BYTES = 1  # each tensor is a part of its file with a digest, as large ones are
SAMPLES, FEATURES, CLASSES = 103, 12, 5
OUT, FAULTS = Path(sys.argv[1]), json.loads(sys.argv[3])
SLOW = float(os.environ.get("SLOW", 0))  # seconds of each sample, so that a signal arrives before the end
RANK, MAIN, LAUNCHER = int(os.environ.get("RANK", 0)), os.getpid(), os.getppid()
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
KIND, NUMBER, VICTIM = FAULTS[ATTEMPT] if len(FAULTS) > ATTEMPT else ("", 0, -1)
used: list[int] = []


class Augmented:
    """Draw random numbers for each sample."""

    def __init__(self, size, is_training):
        draw = numpy.random.RandomState(size)
        self.x, self.y, self.is_training = (
            draw.normal(size=(size, FEATURES)),
            draw.randint(0, CLASSES, size),
            is_training,
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.is_training:
            used.append(index)
            time.sleep(SLOW)
        return self.x[index] * random.uniform(0.9, 1.1) + 0.1 * numpy.random.normal(size=FEATURES), self.y[index]


class Watch(Callback):
    """Record the samples of each update, and then let the fault strike."""

    def on_train_start(self, state):
        used.clear()  # a model without an Input is built with a sample
        self.file = (OUT / f"samples-{RANK}.jsonl").open("a", buffering=1)

    def on_step_end(self, state, result):
        self.file.write(json.dumps([state.epoch, state.step, used]) + "\n")
        used.clear()
        if (state.step, RANK) == (NUMBER, VICTIM):
            whom = LAUNCHER if "launcher" in KIND else MAIN
            os.kill(whom, signal.SIGTERM if KIND.startswith("TERM") else signal.SIGKILL)


layers = [
    keras.layers.Dense(24, activation="relu"),
    keras.layers.Dropout(0.2),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(CLASSES),
]
model = keras.Sequential(layers)
optimizer = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-2, 21))
trainer = TensorFlowDistributedTrainer(
    model, optimizer=optimizer, gradient_clipping=0.5, warmup_steps=2, batch_size=4, callbacks=[Watch()]
)
trainer.fit(Augmented(SAMPLES, True), Augmented(19, False))
