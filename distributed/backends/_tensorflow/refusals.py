"""Settings that the step on TensorFlow refuses, and what to use instead. Loads no engine."""

from __future__ import annotations

from distributed.backends.base import Refusals

REFUSES: Refusals = {
    "checkpoint_async": "its checkpoints are written synchronously: drop it, or use backend 'pytorch-ddp'",
    "snapshot_every_n_steps": "it keeps no snapshots in memory: drop it, or use backend 'pytorch-ddp'",
    "communication_backend": "TensorFlow has transports of its own: drop it",
    "mixed_precision=fp16": "TensorFlow's loss scaling is not in this version: set mixed_precision='bf16'",
    "activation_checkpointing": "wrap the layers in keras.RematScope in the model instead",
    "checkpoint_trainable_only": "checkpoints of Keras models have all weights: drop it",
    "compile": "the step is a TensorFlow graph already: drop it",
    "optimizer=muon": "it is not in this version for Keras models: set optimizer='adamw', or pass keras.optimizers.Muon(...)",
    "scheduler_interval=epoch": "a Keras LearningRateSchedule counts updates: give its lengths in updates",
    "scaler_init_scale": "there is no loss scaling: drop it",
    "scaler_growth_interval": "there is no loss scaling: drop it",
    "data.presharded": "give every rank all samples, each takes its part",
    "data.shard_streams": "every rank reads the whole tf.data.Dataset: drop it",
    "data.remove_unused_columns": "Keras models get all columns: remove those that are not needed from the data set",
}
# Why a `training_step` or a loss cannot log.
IN_GRAPH = (
    "runs in a training_step or a loss that TensorFlow compiles, so it would log once and never again: return the value in the"
    " dict of training_step, or log it in a hook of a callback"
)
