"""Communicate between processes that train with TensorFlow, through collectives of TensorFlow or of Horovod."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy
import tensorflow as tf

from distributed.backends import wire
from distributed.backends._tensorflow.replicas import Replicas
from distributed.backends._tensorflow.start import Joined
from distributed.backends.world import Key, World
from distributed.errors import DistributedError
from distributed.launching.secret import messages
from distributed.state import WorkerContext

_LOST = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, tf.errors.CancelledError)

# Exceptions of Python code in a graph. Workaround (TensorFlow 2.21, no upstream issue known; may go when TensorFlow raises the
# exception of the function): it replaces the exception by one of its own.
_raised: list[Exception] = []


def carried(function: Callable[[Any], Any], value: Any) -> Any:
    """Call the Python function `function` with an array, in a graph. `heard` raises the exceptions of `function`."""

    def call(array: Any) -> Any:
        try:
            return function(array)
        except (RuntimeError, DistributedError) as error:
            _raised[:] = [error]
            raise

    return tf.numpy_function(call, [value], value.dtype)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Raise the exceptions of Python code in the graphs that the block calls. If a collective fails because a worker
    was lost, raise a ConnectionResetError of one line that names the worker."""
    try:
        yield
    except tf.errors.OpError as error:
        if _raised:
            raise _raised.pop() from None
        if not isinstance(error, _LOST):
            raise
        task = re.search(r"/job:(worker|chief)/(?:replica:\d+/)?task:(\d+)", error.message)
        reason = re.search(
            r"Collective ops is aborted by: ([^\n]*)|([^\n]*(?:timed out|Deadline)[^\n]*)", error.message
        )
        if reason is None:
            raise
        who = f"{task[1]} {task[2]}" if task else "another worker"
        raise ConnectionResetError(f"lost the connection to {who}: {(reason[1] or reason[2])[:200]}") from None


class Collectives(Protocol):
    """Combine tensors over several processes. Every method is a collective."""

    def summed(self, tensors: list[Any]) -> list[Any]:
        """Return tensors of one element type summed over all ranks, in a graph."""

    def gradients(self, tensors: list[Any]) -> list[Any]:
        """Return the same as `summed`, but sent in the element type that the run's options choose for gradients."""

    def sum_floats(self, vector: Any) -> Any:
        """Return a float64 vector summed element by element over all ranks."""

    def sum_integers(self, vector: Any) -> Any:
        """Return an int64 vector summed element by element over all ranks."""

    def gather(self, vector: Any) -> Any:
        """Return the int32 vectors of all ranks, concatenated."""


class ClusterCollectives:
    """Collectives of MultiWorkerMirroredStrategy, traced once for a cluster and shared by all trainers."""

    def __init__(self, strategy: Any, timeout_s: float) -> None:
        self._strategy = strategy
        self._options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
        self.sum_floats = self._of_vectors(self.summed, tf.float64)
        self.sum_integers = self._of_vectors(self.summed, tf.int64)
        self.gather = self._of_vectors(self._gathered, tf.int32)
        self.gradients = self.summed

    def summed(self, tensors: list[Any]) -> list[Any]:
        def call(*each: Any) -> Any:
            here = [tf.identity(tensor) for tensor in each]  # a graph's arguments have no device yet
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, here, self._options)

        return list(self._strategy.run(call, args=tuple(tensors)))

    def _gathered(self, tensors: list[Any]) -> list[Any]:
        def call(tensor: Any) -> Any:
            return tf.distribute.get_replica_context().all_gather(tf.identity(tensor), 0, self._options)

        return [self._strategy.run(call, args=tuple(tensors))]

    def _of_vectors(self, function: Callable[[list[Any]], list[Any]], dtype: Any) -> Any:
        """Return `function` as a graph for a single vector of any length."""
        signature = [tf.TensorSpec([None], dtype)]
        return tf.function(lambda vector: function([vector])[0], input_signature=signature, autograph=False)


@functools.cache
def cluster_collectives(joined: Joined, timeout_s: float) -> ClusterCollectives:
    """Return the collectives of a cluster."""
    return ClusterCollectives(joined.strategy, timeout_s)


class TensorFlowWorld(World):
    """Connect the processes that train together, with collectives for TensorFlow's tensors. Every rank must call each
    collective, in the same order."""

    def __init__(
        self, context: WorkerContext, them: Collectives | None, store: Any = None, replicas: Replicas | None = None
    ) -> None:
        """Make the world of this process.

        Args:
            them: collectives of several processes, or None.
            store: store that all processes share.
            replicas: replicas of this process.
        """
        self.context, self._them, self._store = context, them, store
        self.replicas = Replicas() if replicas is None else replicas

    def summed_in_graph(self, tensors: list[Any]) -> list[Any]:
        """Return `tensors` summed over all ranks and replicas, while a graph is traced."""
        return self.replicas.summed(tensors) if self._them is None else _by_type(self._them.summed, tensors)

    def summed_gradients(self, gradients: list[Any]) -> list[Any]:
        """Return the same as `summed_in_graph`, but sent in fewer bits if the options of the run select that."""
        return self.replicas.summed(gradients) if self._them is None else _by_type(self._them.gradients, gradients)

    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        return dict(zip(sums, self._sum(list(sums.values())), strict=True))

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return self.gather(value if self.rank == src else None)[src]

    def gather(self, value: Any) -> list[Any]:
        if self._them is None:
            return [value]
        data = wire.to_bytes(value)
        padded = data + b"\0" * (-len(data) % 4)
        world = range(self.context.world_size)
        lengths = self._sum([float(len(data)) if rank == self.context.rank else 0.0 for rank in world])
        with heard():
            everything = self._them.gather(numpy.frombuffer(padded, numpy.int32)).numpy().tobytes()
        values, start = [], 0
        for length in map(int, lengths):
            values.append(wire.from_bytes(everything[start : start + length]))
            start += length + -length % 4
        return values

    def barrier(self) -> None:
        self._sum([0.0])

    def copy_from_main(self, variables: Sequence[Any]) -> None:
        """Copy the values of the first replica of the main process into `variables`. A collective."""
        if self._them is None:
            for variable in variables if self.replicas.number > 1 else ():
                variable.assign(variable.numpy())
            return
        for variable in variables:
            dtype = variable.dtype
            is_whole = dtype.is_integer
            value = variable.numpy().astype(numpy.int64 if is_whole else numpy.float64)
            mine = value if self.context.is_main_process else numpy.zeros_like(value)
            total = (self._them.sum_integers if is_whole else self._them.sum_floats)(mine.reshape(-1)).numpy()
            variable.assign(total.reshape(value.shape).astype(dtype.as_numpy_dtype))

    def key_value_store(self) -> Any:
        return None if self._store is None else messages(self._store, "common-step")

    def _sum(self, values: Sequence[float]) -> list[float]:
        """Return `values` summed element by element over all ranks. A collective."""
        if self._them is None or not values:
            return list(values)
        with heard():
            total: list[float] = self._them.sum_floats(numpy.asarray(values, numpy.float64)).numpy().tolist()
        return total


def _by_type(combine: Callable[[list[Any]], list[Any]], tensors: list[Any]) -> list[Any]:
    """Call `combine` on the tensors of each element type, and return the results in the order of `tensors`."""
    out = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        for index, total in zip(indices, combine([tensors[i] for i in indices]), strict=True):
            out[index] = total
    return out
