"""Train with TensorFlow alone, without a Trainer: `model.fit` under the strategy that the first argument names."""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

in_use = getattr(context.context(), "_context_handle", None) is not None
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(f"SIGTERM ends it {not int(status['SigCgt'], 16) >> signal.SIGTERM - 1 & 1}")
print(f"memory growth {os.environ.get('TF_FORCE_GPU_ALLOW_GROWTH')}, in use {in_use}")

if os.environ["WORLD_SIZE"] != "1" and os.environ["RANK"] == "0":
    time.sleep(1)  # the other processes are ahead of this one, as on a busy machine
kind = getattr(tf.distribute, sys.argv[1])
strategy, another = kind(), kind()
print(f"replicas {strategy.num_replicas_in_sync}")
for each, number in ((strategy, 2), (another, 3)):
    with each.scope():
        ones = tf.Variable(tf.ones([number]))
    print("summed", each.reduce("sum", each.run(lambda value=ones: value + 0.0), axis=None).numpy())
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10, activation="softmax")])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
history = model.fit(x, np.arange(64) % 10, epochs=2, batch_size=16, verbose=0)
print(f"trained to {history.history['loss'][-1]:.3f}")
