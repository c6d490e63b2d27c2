"""Run functions on the devices of this process: one device, or those of a MirroredStrategy. Each device gets a slice of
every micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from distributed.backends._tensorflow.sources import Data
from distributed.config.plan import BatchPlan
from distributed.errors import ConfigError, ResourceError
from distributed.state import UpdateBatch


def mirrored(device: str, number: int) -> Replicas:
    """Return replicas on `number` GPUs, or on as many logical devices of the CPU (`device="cpu"`)."""
    if device == "cpu":
        split_cpu(number)
    kind = "CPU" if device == "cpu" else "GPU"
    found = tf.config.list_logical_devices(kind)
    if len(found) < number:
        raise ResourceError(
            f"tensorflow.num_devices={number}, but TensorFlow sees {len(found)} {kind}{'s' * (len(found) != 1)}: set"
            f" tensorflow.num_devices={len(found)} or check CUDA_VISIBLE_DEVICES and TensorFlow's CUDA libraries"
        )
    # Workaround (TensorFlow 2.21, no upstream issue known; may go when these collectives run in one order):
    # TensorFlow's collectives between devices of one CPU may run in different orders on the devices, and then abort.
    sums = tf.distribute.ReductionToOneDevice() if device == "cpu" else None
    return Replicas(tf.distribute.MirroredStrategy([f"{kind}:{i}" for i in range(number)], cross_device_ops=sums))


def split_cpu(number: int) -> None:
    """Make `number` logical devices of the CPU. TensorFlow allows this only before its first operation."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    try:
        known = tf.config.get_logical_device_configuration(cpu)
        if len(known or [None]) != number:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) < number:
            raise ConfigError(
                f"tensorflow.num_devices={number} was set after TensorFlow was used in this process, which is too late to split the"
                f" CPU into devices: start with 'python -m distributed.cli train --backend tensorflow --set"
                f" tensorflow.num_devices={number}', or make model and data in functions"
            ) from None


@contextlib.contextmanager
def _unscaled() -> Iterator[None]:
    """Disable the division by the number of replicas in Keras's losses (`scale_loss_for_distribution`).

    Workaround (Keras 3.15, no upstream issue known; may go when Keras makes the division optional): the step here
    divides by the samples of all replicas.
    """
    module = importlib.import_module("keras.src.losses.loss")
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    own = {name: getattr(module, name) for name in names}
    try:
        for name in names:
            setattr(module, name, lambda value: value)
        yield
    finally:
        for name, function in own.items():
            setattr(module, name, function)


class Replicas:
    """Devices on which a function runs. `number` is 1 without a strategy."""

    def __init__(self, strategy: Any = None) -> None:
        self.strategy = strategy
        self.number: int = 1 if strategy is None else strategy.num_replicas_in_sync

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which new variables get a copy on every device."""
        return contextlib.nullcontext() if self.strategy is None else self.strategy.scope()

    def run(self, function: Callable[..., Any], each: Sequence[Sequence[Any]]) -> list[Any]:
        """Call `function(replica, *each[replica])` on the device of every replica and return the results. Call it while
        a graph is traced."""
        if self.strategy is None:
            return [function(0, *each[0])]

        def call() -> Any:
            replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            return function(replica, *each[replica])

        with _unscaled():
            found = self.strategy.run(tf.autograph.experimental.do_not_convert(call))
        return [tf.nest.map_structure(lambda leaf, r=r: self._of(leaf, r), found) for r in range(self.number)]

    def _of(self, value: Any, replica: int) -> Any:
        values = self.strategy.experimental_local_results(value)
        return values[replica if len(values) > 1 else 0]

    def summed(self, tensors: list[Any]) -> list[Any]:
        """Return `tensors` summed over the replicas. Call it within `run`."""
        if self.strategy is None:
            return tensors
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors))

    def cut(self, batch: Any, num_samples: int) -> list[tuple[Any, int]]:
        """Return (batch, number of samples that count) for each replica. A replica without samples gets the first
        sample, which does not count."""
        if self.number == 1:
            return [(batch, num_samples)]
        counts = [len(range(replica, num_samples, self.number)) for replica in range(self.number)]
        slices = [slice(replica, None, self.number) if n else slice(0, 1) for replica, n in enumerate(counts)]
        return [
            (tf.nest.map_structure(lambda leaf, where=where: leaf[where] if leaf.ndim else leaf, batch), n)
            for where, n in zip(slices, counts, strict=True)
        ]

    def holds(self, model: Any) -> bool:
        """Return True if the model's variables belong to this strategy. A model without variables returns False,
        because it must be built in `scope`."""
        owners = [getattr(variable.value, "distribute_strategy", None) for variable in model.variables]
        return self.strategy is None or (bool(owners) and all(owner is self.strategy for owner in owners))

    def copies(self, variable: Any) -> Sequence[Any]:
        """Return the copies of a Keras variable, one for each replica, or () if all replicas share it."""
        value = variable.value
        is_copied = self.strategy is not None and isinstance(value, tf.distribute.DistributedValues)
        return value.values if is_copied else ()


class Joint(Data):
    """Data whose micro-batches are for all devices of this process together. Its `batch` counts each device as one
    data-parallel rank."""

    def __init__(self, inner: Data, num_devices: int) -> None:
        self._inner, self.num_samples, self.notices = inner, inner.num_samples, inner.notices
        whole = inner.batch
        self.batch = dataclasses.replace(
            whole,
            batch_size=-(-whole.batch_size // num_devices),
            data_parallel_size=whole.data_parallel_size * num_devices,
        )

    @property
    def updates_per_epoch(self) -> int | None:
        """Updates per epoch of the inner data."""
        return self._inner.updates_per_epoch

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        """Yield the update batches of `epoch` after `skip` global samples."""
        return self._inner.epoch(epoch, skip)

    def use_version(self, version: int) -> None:
        """Read later epochs in the order of `version`."""
        self._inner.use_version(version)

    def example(self) -> Any:
        """Return a batch to build a model with."""
        return self._inner.example()

    def close(self) -> None:
        """Stop loader processes."""
        self._inner.close()


def joint_plan(batch: BatchPlan, num_devices: int) -> BatchPlan:
    """Return the plan of a process that takes the slices of all its devices."""
    return dataclasses.replace(
        batch, batch_size=batch.batch_size * num_devices, data_parallel_size=batch.data_parallel_size // num_devices
    )
