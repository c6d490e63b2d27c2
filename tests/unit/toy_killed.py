"""Train a line. With the argument `--killed`, the process is killed once, in the middle of an epoch. Prints the weights as JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy
import toy_entry  # noqa: F401 - before the settings are read
from toy_engine import Line

from distributed import Callback, Trainer

KILLED = Path("killed")


class Kill(Callback):
    def on_step_end(self, state, result):
        if state.step == 13 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)


rng = numpy.random.default_rng(0)
inputs = rng.normal(size=(64, 3))
trainer = Trainer(
    Line(3), backend="toy", batch_size=8, learning_rate=0.01, epochs=4, checkpoint_every_n_steps=5,
    callbacks=[Kill()] * ("--killed" in sys.argv), verbose=False,
)  # fmt: skip
trainer.fit((inputs, inputs @ [1.0, -2.0, 3.0]))
print(json.dumps(trainer.model.weights.tolist()))
