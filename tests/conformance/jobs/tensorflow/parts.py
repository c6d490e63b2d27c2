"""Print as JSON what parts of the backend return for small inputs."""

from __future__ import annotations

import json
import os
import random
from unittest import mock

import keras
import numpy
import tensorflow as tf
from torch.utils.data import ChainDataset

from distributed.backends._tensorflow.optim import Rates
from distributed.backends._tensorflow.replicas import Joint
from distributed.backends._tensorflow.sources import TensorFlowStreamData, batch_size_of, shard
from distributed.backends._tensorflow.start import set_memory_growth
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.state import DataRole, WorkerContext

HALVING = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
SAMPLES = tf.data.Dataset.range(10)
BATCHES = SAMPLES.batch(4)


def warm_up(left_out, rate=0.5):
    """Return the rates of six updates, of which two are warm-up, without those of updates that were left out."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(rate)
    optimizer.build(model.trainable_variables)
    nothing = [tf.zeros_like(variable) for variable in model.trainable_variables]
    settings = merge(Overrides(), {"backend": "tensorflow", "warmup_steps": 2})
    rates, used = Rates(optimizer, settings, BatchPlan(4, 1, 1, 4), print), []
    for step in range(6):
        if step not in left_out:
            used.append(rates.at(step))
            rates.before_update(step)
            with rates.updating() as update:
                assert float(optimizer._get_current_learning_rate()) == used[-1]
                update(nothing, model.trainable_variables)
    return used


def growing(first_only, environ):
    """Return, for two GPUs, [those whose memory grows, those that stay visible]."""
    grown, visible = [], []
    with (
        mock.patch.object(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0", f"{kind}:1"]),
        mock.patch.object(tf.config.experimental, "set_memory_growth", lambda gpu, on: grown.append([gpu, on])),
        mock.patch.object(tf.config, "set_visible_devices", lambda gpus, kind: visible.extend(gpus)),
        mock.patch.dict(os.environ, environ),
    ):
        set_memory_growth(first_only=first_only)
    return [grown, visible]


def size_of(data):
    try:
        return batch_size_of(data)
    except ConfigError as error:
        return str(error)


def updates(data, skip=0):
    """Return the samples of each update, which has four."""
    stream = TensorFlowStreamData(data, BatchPlan(4, 1, 1, 4), 0, "train_data", None)
    return [group.micro_batches[0].batch.tolist() for group in stream.epoch(0, skip)]


class Drawing:
    """Samples that are random numbers of Python and numpy."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return numpy.array([index, random.random(), numpy.random.rand()])


def noticed():
    """Return the notices of a stream of torch, of which two processes with two devices each must read the whole."""
    data = shard(
        ChainDataset([]), batch=BatchPlan(2, 1, 2, 4), context=WorkerContext(0, 2, 0, 2, 0, "cpu"), config=DistributedConfig(),
        role=DataRole.TRAINING, reduce=dict,
    )  # fmt: skip
    return Joint(data, 2).notices


def drawn(version, num_devices=1):
    """Return the samples of an epoch."""
    data = shard(
        Drawing(), batch=BatchPlan(4, 1, 1, 4), context=WorkerContext(0, 1, 0, 1, 0, "cpu"), config=DistributedConfig(shuffle=True),
        role=DataRole.TRAINING, reduce=dict,
    )  # fmt: skip
    data = Joint(data, num_devices) if num_devices > 1 else data
    data.use_version(version)
    return [row for update in data.epoch(1) for row in update.micro_batches[0].batch.tolist()]


print(
    json.dumps(
        {
            "warm-up": warm_up(()),
            "warm-up, its last left out": warm_up((1, 2)),
            "warm-up of a schedule": warm_up((4, 5), HALVING),
            "warm-up of a schedule, its first left out": warm_up((0, 5), HALVING),
            "growing": {
                "all": growing(False, {}),
                "first": growing(True, {}),
                "refused": growing(False, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}),
            },
            "inner": {
                "samples": size_of(BATCHES.flat_map(tf.data.Dataset.from_tensor_slices)),
                "batches": size_of(BATCHES.flat_map(lambda x: tf.data.Dataset.from_tensors(x * 2))),
                "interleaved": size_of(BATCHES.interleave(tf.data.Dataset.from_tensor_slices, num_parallel_calls=2)),
                "more": size_of(BATCHES.flat_map(lambda x: tf.data.Dataset.from_tensors((x, x)))),
            },
            "sizes": {
                "samples": size_of(SAMPLES),
                "batches": size_of(BATCHES.map(lambda x: x + 1).prefetch(1)),
                "zipped": size_of(tf.data.Dataset.zip((BATCHES, BATCHES))),
                "unbatched": size_of(BATCHES.unbatch()),
                "mixed": size_of(tf.data.Dataset.zip((BATCHES, SAMPLES))),
            },
            "once": updates(BATCHES),
            "twice": updates(BATCHES.repeat(2)),
            "twice, from the third": updates(BATCHES.repeat(2), 8),
            "cut smaller": updates(BATCHES.rebatch(2)),
            "drawn": [drawn(version) for version in (2, 3)],
            "drawn for two devices": [drawn(version, 2) for version in (2, 3)],
            "noticed": noticed(),
        }
    )
)
