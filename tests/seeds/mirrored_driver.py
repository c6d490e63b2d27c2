"""TensorFlow's own strategy and `model.fit`, as 002 shows them, in one process."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.seeds.running import run

inputs = np.random.default_rng(0).normal(size=(96, 10)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((inputs, inputs.argmax(1))).batch(16)
tf.keras.utils.set_random_seed(0)
found = run("002/mirrored.py", train_dataset=data, val_dataset=data)
losses = found["model"].history.history["val_loss"]
print(f"replicas {found['strategy'].num_replicas_in_sync}, losses {losses[0]:.4f} {losses[-1]:.4f}")
