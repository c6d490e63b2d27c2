"""Run the Keras sample of the documentation: `fit` starts the processes that train a model from the first lines."""

import sys

import keras
import numpy as np

from distributed import TensorFlowDistributedTrainer

draw = np.random.default_rng(0)
images = draw.normal(size=(96, 8)).astype("float32")
labels = images[:, :4].argmax(1)
model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(4, activation="softmax")]
)
model.compile(optimizer=keras.optimizers.Adam(0.02), loss="sparse_categorical_crossentropy", metrics=["accuracy"])

settings = {"nproc_per_node": int(sys.argv[1])} if len(sys.argv) > 1 else {}
trainer = TensorFlowDistributedTrainer(model, epochs=4, global_batch_size=16, **settings)
history = trainer.fit((images, labels), (images, labels))
if trainer.is_main_process:
    loss, accuracy = model.evaluate(images, labels, verbose=0)
    print(
        f"best {history.best_accuracy:.4f}, here {accuracy:.4f}, again {trainer.evaluate((images, labels))['accuracy']:.4f}"
    )
    print(f"predicted {trainer.predict((images, labels)).shape}")
