"""Horovod's collectives for tensors of TensorFlow. The tensors are sent as arrays through horovod.torch, which
`make horovod` always builds.

Workaround (Horovod 0.28.1, no upstream issue known; may go when Horovod's Keras optimizer averages under Keras 3): that
optimizer is not used, because it averages nothing. Horovod's operations for TensorFlow's graphs are not used either:
they are a second library that would start beside the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import tensorflow as tf
import torch

from distributed.backends._horovod.world import HorovodWorld
from distributed.backends._tensorflow.world import carried


class HorovodCollectives:
    """Implement `distributed.backends._tensorflow.world.Collectives`. Tensors of one call are sent as one vector."""

    def __init__(self, world: HorovodWorld, is_compressed: bool) -> None:
        self._world, self._is_compressed = world, is_compressed

    def summed(self, tensors: list[Any]) -> list[Any]:
        return _as_one(self.sum_floats, tensors)

    def gradients(self, tensors: list[Any]) -> list[Any]:
        return _as_one(self._sum_compressed if self._is_compressed else self.sum_floats, tensors)

    def sum_floats(self, vector: Any) -> Any:
        total = torch.from_numpy(numpy.array(vector))
        self._world.combine(total, "sum").wait()
        return total

    sum_integers = sum_floats

    def gather(self, vector: Any) -> Any:
        return torch.cat([torch.from_numpy(each) for each in self._world.gather(numpy.array(vector))])

    def _sum_compressed(self, vector: Any) -> Any:
        total = torch.from_numpy(numpy.array(vector))
        wire = total.half()
        self._world.combine(wire, "sum").wait()
        return total.copy_(wire)


def _as_one(combine: Callable[[Any], Any], tensors: list[Any]) -> list[Any]:
    """Concatenate `tensors` into one array, apply `combine` to it, and return the parts in the shapes of `tensors`.
    Call it in a graph."""
    whole = tf.concat([tf.reshape(each, [-1]) for each in tensors], 0)
    summed = carried(lambda array: combine(array).numpy(), whole)
    summed.set_shape([None])
    parts = tf.split(summed, [tf.size(each) for each in tensors])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(each)), each.shape) for part, each in zip(parts, tensors, strict=True)
    ]
