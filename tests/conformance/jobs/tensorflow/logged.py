"""Log another value on each rank, in hooks of a fit of a Keras model on TensorFlow: logged.py OUT. Writes OUT/run_dir."""

import sys
from pathlib import Path

import keras
import numpy as np

from distributed import TensorFlowDistributedTrainer
from tests.conformance.jobs.logs_in_hooks import LogsInHooks

x = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
trainer = TensorFlowDistributedTrainer(
    model, callbacks=[LogsInHooks()], global_batch_size=11, epochs=1, log_every_n_steps=2, verbose=False
)
history = trainer.fit((x, (x.sum(1) > 0).astype(int)))
if trainer.is_main_process:
    Path(sys.argv[1], "run_dir").write_text(str(Path(history.run_dir).absolute()))
