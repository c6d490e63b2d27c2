"""Train a Keras model that draws from every kind of generator. KILLS names the step after which each attempt is killed.

resume.py KILLS   a JSON list of [step, rank]
"""

import json
import os
import signal
import sys

import keras
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, Trainer

KILLS = json.loads(sys.argv[1])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


class Kill(Callback):
    def on_step_end(self, state, result):
        if len(KILLS) > ATTEMPT and [state.step, int(os.environ["RANK"])] == KILLS[ATTEMPT]:
            os.kill(os.getpid(), signal.SIGKILL)


class Noise(keras.layers.Layer):
    """Draw random numbers without a generator of its own."""

    def call(self, x, training=False):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


def model():
    layers = keras.layers
    return keras.Sequential([
        keras.Input((12,)), layers.Dense(24), layers.BatchNormalization(), layers.Dropout(0.2, seed=1), layers.Dropout(0.2), Noise(),
        layers.Dense(5),
    ])  # fmt: skip


draw = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(103, 12, generator=draw), torch.randint(0, 5, (103,), generator=draw))
schedule = keras.optimizers.schedules.CosineDecay(0.02, 21)
trainer = Trainer(
    model, optimizer=lambda variables: keras.optimizers.Adam(schedule), callbacks=[Kill()], gradient_clipping=0.5, epochs=3,
    global_batch_size=16, checkpoint_every_n_steps=3, max_restarts=5, log_every_n_steps=2,
)  # fmt: skip
trainer.fit(DataLoader(data, batch_size=1, shuffle=True), data)
