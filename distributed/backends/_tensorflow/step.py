"""Trace and call the graphs of a step: forward and backward of a micro-batch, sum over ranks, update, evaluation.

Each graph is traced once for each form of batch, for any number of samples. The graph that computes a batch, and so the
last bit of its result, then does not depend on earlier batches, which a resumed run has not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import tensorflow as tf

from distributed.backends._tensorflow.objective import MeasuredBatch, TensorFlowObjective
from distributed.backends._tensorflow.world import TensorFlowWorld, heard
from distributed.errors import ConfigError

Update = Callable[[list[Any], list[Any]], None]  # (gradients, variables)


@dataclasses.dataclass
class PendingUpdate:
    """Gradients and counts of the micro-batches of an update so far, one entry for each replica. `sums` are totals over
    all replicas."""

    gradients: list[list[Any]]
    counts: list[Any]
    sums: dict[str, tuple[Any, Any]]
    norm: Any = None  # norm of the summed gradient, after the last micro-batch
    calls: list[tuple[Any, int]] = dataclasses.field(
        default_factory=list
    )  # metric arguments of this micro-batch, in the form of `evaluate`


class Graphs:
    """Trace a graph of a function for each form of its arguments, and call the graphs."""

    def __init__(self) -> None:
        self._traced: dict[Any, Any] = {}

    def __call__(self, name: Any, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)` in a graph. `name` and the form of `args` select the graph."""
        leaves = [each if tf.is_tensor(each) else numpy.asarray(each) for each in tf.nest.flatten(args)]
        form = tuple(
            (leaf.dtype.name if tf.is_tensor(leaf) else str(leaf.dtype), tuple(leaf.shape)[1:]) for leaf in leaves
        )
        key = name, form, _outline(args)
        if key not in self._traced:
            self._traced[key] = self._trace(function, args, leaves)
        call, outputs = self._traced[key]
        with heard():
            found = call(*[tf.convert_to_tensor(leaf) for leaf in leaves])
        return tf.nest.pack_sequence_as(outputs[0], found)

    def _trace(self, function: Callable[..., Any], args: Any, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        outputs: list[Any] = []

        def flat(*flat_args: Any) -> Any:
            found = function(*tf.nest.pack_sequence_as(args, flat_args))
            outputs[:] = [tf.nest.map_structure(lambda _: 0, found)]
            return tf.nest.flatten(found)

        signature = [tf.TensorSpec([None, *leaf.shape[1:]] if len(leaf.shape) else [], leaf.dtype) for leaf in leaves]
        traced = tf.function(flat, input_signature=signature, autograph=False)
        traced.get_concrete_function()
        return traced, outputs


def _outline(value: Any) -> Any:
    """Return the structure of the containers in `value`, in hashable form."""
    return repr(tf.nest.map_structure(lambda _: 0, value))


class Step:
    """Run the training step of a model and its objective, with all replicas of this process."""

    def __init__(
        self,
        model: Any,
        objective: TensorFlowObjective,
        world: TensorFlowWorld,
        updating: Callable[[], contextlib.AbstractContextManager[Update]],
        clipping: float | None,
    ) -> None:
        """Store the parts of the step. The context `updating()` yields the function that makes an update."""
        self._model, self._objective, self._world = model, objective, world
        self._replicas = world.replicas
        self._updating, self._clipping = updating, clipping
        self._graphs = Graphs()
        self._is_built = False
        self._used: list[int] = []  # indices of the trainable variables on which the loss depends

    # the update

    def forward_backward(
        self, batch: Any, num_samples: int, of_update: int, before: PendingUpdate | None, is_last: bool
    ) -> PendingUpdate:
        """Run forward and backward on one micro-batch and add its gradients to an update.

        With the last micro-batch the gradients of all ranks are summed, divided by the true count and clipped, which is
        a collective.

        Args:
            of_update: number of samples of the update, over all ranks.
            before: the result for the earlier micro-batches of the update, or None for the first one.
        """
        cut = self._cut(batch, num_samples)
        empty = tuple(number == 0 for _, number in cut)
        parts = [(part, numpy.float64(number)) for part, number in cut]
        carried = () if before is None else (before.gradients, before.counts)

        def call(parts: Any, nominal: Any, *carried: Any) -> Any:
            def backward(replica: int, batch: Any, number: Any, *before: Any) -> Any:
                return self._backward(batch, number, nominal, before, empty[replica], any(empty), is_last)

            each = [(*part, *before) for part, *before in zip(parts, *carried, strict=True)]
            gradients, counts, sums, norms, calls = zip(*self._replicas.run(backward, each), strict=True)
            return list(gradients), list(counts), _added(sums), norms[0], list(calls)

        name = "train", empty, is_last, before is not None, self._objective.form("train")
        gradients, counts, sums, norm, calls = self._graphs(name, call, parts, numpy.float64(of_update), *carried)
        if before is not None:
            sums = _added([before.sums, sums])
        return PendingUpdate(gradients, counts, sums, norm if is_last else None, _counted(calls, cut))

    def _cut(self, batch: Any, num_samples: int) -> list[tuple[Any, int]]:
        """Return the slice of each replica. At the first call, create all variables, because replicas cannot create
        them."""
        if not self._is_built and self._replicas.strategy is not None:
            with self._replicas.scope():
                self._objective.build(tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:1]), batch))
        self._is_built = True
        return self._replicas.cut(batch, num_samples)

    def _backward(
        self,
        batch: Any,
        number: Any,
        nominal: Any,
        carried: Sequence[Any],
        is_empty: bool,
        some_are_empty: bool,
        is_last: bool,
    ) -> Any:
        """Run the backward pass on one replica."""
        variables = [v.value for v in self._model.trainable_variables]
        # If a replica is empty, all replicas assign values, old or new ones, because some variables can only be
        # assigned on all replicas together.
        kept = [(v, tf.identity(v.value)) for v in self._model.non_trainable_variables] if some_are_empty else []
        with tf.GradientTape() as tape:
            measured = self._objective(batch, number, training=True)
            value = measured.total / tf.cast(nominal, measured.total.dtype)
        gradients = self._gradients(tape, value, variables)
        count, sums = measured.count, _sums_of(measured)
        with tf.control_dependencies([*gradients, value]):
            for variable, values in kept:
                variable.assign(values if is_empty else tf.identity(variable.value))
        if is_empty:
            gradients = [tf.zeros_like(g) for g in gradients]
            count, sums = tf.zeros_like(count), {n: (tf.zeros_like(a), tf.zeros_like(b)) for n, (a, b) in sums.items()}
        else:  # a loss that is not finite makes the norm NaN, so that all ranks detect it
            gradients[0] += tf.cast(value * 0, gradients[0].dtype)
        if carried:
            gradients = [g + c for g, c in zip(gradients, carried[0], strict=True)]
            count += carried[1]
        norm = tf.zeros((), tf.float64)
        if is_last:
            gradients, norm = self._summed(gradients, count, nominal, measured.is_counted)
        return gradients, count, sums, norm, dict(measured.calls)

    def _gradients(self, tape: Any, value: Any, variables: list[Any]) -> list[Any]:
        found = tape.gradient(value, variables)
        self._used = [i for i, g in enumerate(found) if g is not None]
        if not self._used:
            raise ConfigError(
                "the loss does not depend on any trainable variable of the model: compute it with TensorFlow's operations from"
                " the model's outputs"
            )
        return [tf.convert_to_tensor(found[i]) for i in self._used]  # gradients of embeddings become dense

    def _summed(self, gradients: list[Any], count: Any, nominal: Any, is_counted: bool) -> tuple[list[Any], Any]:
        """Return the gradient of the mean over the update, and its norm before clipping."""
        gradients = self._world.summed_gradients(gradients)
        if is_counted:
            factor = nominal / self._world.summed_in_graph([count])[0]
            gradients = [g * tf.cast(factor, g.dtype) for g in gradients]
        norm = tf.linalg.global_norm(gradients)
        if self._clipping is not None:
            scale = tf.minimum(tf.cast(self._clipping / (norm + 1e-6), norm.dtype), 1)  # as in torch's clip_grad_norm_
            gradients = [g * tf.cast(scale, g.dtype) for g in gradients]
        return gradients, tf.cast(norm, tf.float64)

    def apply(self, gradients: list[list[Any]]) -> None:
        """Update every replica's copy of the variables. The gradients of all replicas are equal."""
        self._graphs("apply", self._apply, gradients)

    def trained(self) -> list[Any]:
        """Return the variables that the newest update changed, in the order of its gradients."""
        return [self._model.trainable_variables[i] for i in self._used]

    def _apply(self, gradients: list[list[Any]]) -> Any:
        trained = self.trained()
        with self._updating() as update:

            def apply(replica: int, own: list[Any]) -> Any:
                update(own, trained)
                return tf.zeros(())

            self._replicas.run(apply, [[own] for own in gradients])
        return tf.zeros(())

    # evaluation

    def evaluate(self, batch: Any, num_samples: int) -> tuple[dict[str, tuple[Any, Any]], list[tuple[Any, int]]]:
        """Return the sums and metric arguments of a batch.

        Returns:
            `(sums, calls)`: (sum, count) over the samples of the batch by name, and for each replica the arguments of
            metrics over all samples with the number of samples.
        """

        cut = self._cut(batch, num_samples)

        def measure(replica: int, batch: Any, number: Any) -> Any:
            measured = self._objective(batch, number, training=False)
            return _sums_of(measured), dict(measured.calls)

        def call(parts: Any) -> Any:
            return self._replicas.run(measure, parts)

        name = "evaluate", self._objective.form("val")
        found = self._graphs(name, call, [(part, numpy.float64(number)) for part, number in cut])
        counted = [sums for (sums, _), (_, number) in zip(found, cut, strict=True) if number]
        sums = _added(counted) if counted else dict.fromkeys(found[0][0], (0.0, 0.0))
        return sums, _counted([calls for _, calls in found], cut)

    def predict(self, batch: Any, num_samples: int) -> list[tuple[Any, int]]:
        """Return (the model's outputs as arrays, number of samples) of each replica."""
        cut = self._cut(batch, num_samples)

        def outputs(replica: int, batch: Any) -> Any:
            return self._objective.predict(batch)

        def call(parts: Any) -> Any:
            return self._replicas.run(outputs, [[part] for part in parts])

        found = self._graphs("predict", call, [part for part, _ in cut])
        arrays = tf.nest.map_structure(lambda value: value.numpy(), found)
        return [(array, number) for array, (_, number) in zip(arrays, cut, strict=True)]


def _counted(calls: Sequence[Any], cut: Sequence[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Return (metric arguments, number of samples that count) of each replica."""
    return [(each, number) for each, (_, number) in zip(calls, cut, strict=True)]


def _added(sums: Sequence[Mapping[str, tuple[Any, Any]]]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (sum, count), the totals over all entries of `sums`."""
    total = dict(sums[0])
    for more in sums[1:]:
        total = {name: (value + more[name][0], count + more[name][1]) for name, (value, count) in total.items()}
    return total


def _sums_of(measured: MeasuredBatch) -> dict[str, tuple[Any, Any]]:
    sums = {"loss": (measured.total, measured.count), **measured.metrics}
    return {name: (tf.cast(a, tf.float64), tf.cast(b, tf.float64)) for name, (a, b) in sums.items()}
