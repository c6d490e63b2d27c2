# 002, "TensorFlow Distributed Strategy". Changed: layers, epochs.
import tensorflow as tf
from distributed import TensorFlowDistributedTrainer

# Create strategy
strategy = tf.distribute.MirroredStrategy()

# Build model inside strategy scope
with strategy.scope():
    model = tf.keras.Sequential([
        tf.keras.layers.Dense(16, activation='relu'),
        tf.keras.layers.Dense(10, activation='softmax')
    ])

    model.compile(
        optimizer='adam',
        loss='sparse_categorical_crossentropy',
        metrics=['accuracy']
    )

# Train - automatically distributed!
model.fit(
    train_dataset,
    epochs=3,
    validation_data=val_dataset
)
