"""Compute the loss and metrics of a batch while a graph is traced. They are the same on every engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from distributed.backends._keras.batches import KerasBatch, unpacked
from distributed.backends._keras.by_name import own_metrics
from distributed.backends._keras.comparison import Comparison
from distributed.backends._keras.losses import compiled_metrics, is_of_keras, metric_value, of_output
from distributed.backends._keras.measures import is_mean
from distributed.backends._tensorflow.over_all import Calls, measure_of
from distributed.backends.failures import no_arguments, not_a_loss, not_called
from distributed.backends.measured import Measured as Metrics
from distributed.backends.parts import Arguments, arguments
from distributed.errors import ConfigError
from distributed.metrics.monitor import check_names

MetricSums = dict[str, tuple[Any, Any]]  # name -> (sum, count)


@dataclasses.dataclass
class MeasuredBatch:
    """Result of one micro-batch: a differentiable sum over its samples, and its divisor."""

    total: Any
    count: Any
    is_counted: bool  # whether the loss returned the count itself
    metrics: MetricSums
    calls: Calls  # metric over all samples -> its arguments


class TensorFlowObjective:
    """Call the model on a batch, and compute its loss and metrics. Defaults that are chosen at the first batch are
    reported once."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any] | str | None,
        training_step: Callable[..., Any] | None,
        metrics: Mapping[str, Any],
        chosen: Metrics,
        notice: Callable[[str], None],
        dtype: str,
    ) -> None:
        """Store the settings of a fit.

        Args:
            metrics: all metrics by name. Those that are not Keras metric objects are ignored here.
            chosen: the metrics that are not Keras metric objects.
        """
        self._model, self._training_step, self._dtype, self._chosen = model, training_step, dtype, chosen
        self._comparison = Comparison(model, loss_fn, notice)
        self._keras_metrics = {n: f for n, f in metrics.items() if isinstance(f, (keras.metrics.Metric, str))}
        self._metrics: dict[str, tuple[Any, Any, bool]] | None = None  # in the form of `compiled_metrics`

    def __call__(self, batch: Any, num_samples: Any, training: bool) -> MeasuredBatch:
        """Compute the loss and metrics of a batch. `num_samples` is a scalar, the number of samples that count."""
        split = "train" if training else "val"
        if self._training_step is not None:
            return self._from_step(self._training_step(self._model, batch), num_samples, split)
        parts = unpacked(batch)
        outputs = tf.nest.map_structure(self._widened, self._model(parts.x, training=training))
        loss = self._compare(parts, outputs, training)
        sums = self._measure(parts, outputs, num_samples, split)
        return dataclasses.replace(
            self._measured(loss, num_samples), metrics=sums, calls=self._calls(parts, outputs, split)
        )

    def build(self, batch: Any) -> None:
        """Create the variables of the model, and of its compiled loss and metrics, from a first batch. Call this method
        eagerly, not in a graph."""
        outputs = self.predict(batch)
        targets = None if self._training_step is not None else unpacked(batch).y
        if targets is None:
            return
        outputs = tf.nest.map_structure(self._widened, outputs)
        self._comparison.build(targets, outputs)
        self._choose_metrics(targets, outputs)

    def form(self, split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the metrics that a graph for `split` computes. If they change, the graph must be traced
        again."""
        return tuple(self._chosen.functions(split)), tuple(self._chosen.wholes.names(split))

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for `batch` without its targets."""
        return self._model(unpacked(batch).x, training=False)

    def _widened(self, output: Any) -> Any:
        """Return the output in the element type of the run if it has only 16 bits. Losses and metrics are computed in
        the type of the run."""
        if tf.is_tensor(output) and output.dtype in (tf.bfloat16, tf.float16):
            wide = tf.cast(output, self._dtype)
            if (mask := getattr(output, "_keras_mask", None)) is not None:
                wide._keras_mask = mask
            return wide
        return output

    # losses

    def _compare(self, parts: KerasBatch, outputs: Any, training: bool) -> tuple[Any, Any]:
        """Return (loss, count) including the regularisation of the model's layers. If the count is None, the loss is a
        mean over samples."""
        value, is_whole = self._comparison(parts, outputs, training)
        return _as_loss(value) if is_whole else self._regularized(_as_loss(value))

    def _regularized(self, loss: tuple[Any, Any]) -> tuple[Any, Any]:
        value, count = loss
        if self._model.losses:
            more = tf.add_n([tf.cast(each, value.dtype) for each in self._model.losses])
            value += more if count is None else more * tf.cast(count, value.dtype)
        return value, count

    def _from_step(self, value: Any, num_samples: Any, split: str) -> MeasuredBatch:
        """Return the loss and metrics in the result `value` of a `training_step`."""
        metrics: MetricSums = {}
        returned: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        calls = {}
        for name in filter(self._chosen.is_call, self._chosen.wholes.names(split)):
            if name not in returned:
                raise no_arguments(name)
            calls[name] = arguments(returned[name])
        for name in sorted(self._chosen.functions(split).keys() - returned.keys()):
            raise not_called(name)
        if isinstance(value, Mapping):
            if "loss" not in value:
                raise ConfigError(f"training_step returned a dict without 'loss' ({', '.join(value)}): add the loss")
            check_names(name for name in value if name != "loss")
            means = {name: each for name, each in value.items() if name != "loss" and not self._chosen.is_call(name)}
            metrics = {name: _sum_and_count(_as_loss(each, name), num_samples) for name, each in means.items()}
            value = value["loss"]
        elif hasattr(value, "loss"):
            value = value.loss
        if value is None:
            raise ConfigError("training_step returned None: return the loss")
        return dataclasses.replace(self._measured(_as_loss(value), num_samples), metrics=metrics, calls=calls)

    def _measured(self, loss: tuple[Any, Any], num_samples: Any) -> MeasuredBatch:
        if not loss[0].dtype.is_floating:
            raise ConfigError(
                f"the loss is {loss[0].dtype.name}, which has no gradient: return a floating-point tensor"
            )
        return MeasuredBatch(*_sum_and_count(loss, num_samples), loss[1] is not None, {}, {})

    # metrics

    def _measure(self, parts: KerasBatch, outputs: Any, num_samples: Any, split: str) -> MetricSums:
        """Return (sum, count) of each metric that is a mean over samples."""
        if parts.y is None:
            return {}
        sums: MetricSums = {}
        for name, (metric, position, is_weighted) in self._choose_metrics(parts.y, outputs).items():
            weight = parts.weight if is_weighted else None
            if not is_mean(metric):
                continue
            sums[name] = metric_value(metric, of_output(parts.y, position), of_output(outputs, position), weight)
        for name, function in self._chosen.functions(split).items():
            values = function(parts.y, outputs) if is_of_keras(function) else function(outputs, parts.y)
            sums[name] = _sum_and_count(_as_loss(values, name), num_samples)
        if "accuracy" not in sums and not self._chosen.wholes.has("accuracy") and _is_class_index(outputs, parts.y):
            hits = tf.argmax(outputs, axis=1, output_type=tf.int64) == tf.cast(parts.y, tf.int64)
            sums["accuracy"] = tf.reduce_sum(tf.cast(hits, tf.float64)), num_samples
        return sums

    def _calls(self, parts: KerasBatch, outputs: Any, split: str) -> Calls:
        if parts.y is None:
            return {}
        calls: dict[str, Arguments] = {}
        chosen = self._choose_metrics(parts.y, outputs)
        for name in self._chosen.wholes.names(split):
            _, position, is_weighted = chosen.get(name, (None, None, False))
            weight = {"sample_weight": parts.weight} if is_weighted and parts.weight is not None else {}
            calls[name] = Arguments((of_output(outputs, position), of_output(parts.y, position)), weight)
        return calls

    def _choose_metrics(self, targets: Any, outputs: Any) -> dict[str, tuple[Any, Any, bool]]:
        if self._metrics is None:
            own = own_metrics(self._keras_metrics, targets, outputs)
            self._metrics = own | compiled_metrics(self._model, targets, outputs)
            for name, (metric, _, _) in self._metrics.items():
                if not is_mean(metric):
                    self._chosen.wholes.add(name, functools.partial(measure_of, metric))
        return self._metrics


def _as_loss(value: Any, metric: str | None = None) -> tuple[Any, Any]:
    """Return (value, count) of a loss or metric in any allowed form. If the count is None, the value is a mean over the
    batch's samples. Raises ConfigError for other forms; the message names `metric` if it is given."""
    if isinstance(value, tuple) and len(value) == 2:
        return tf.reshape(tf.convert_to_tensor(value[0]), ()), tf.reshape(tf.convert_to_tensor(value[1]), ())
    if not isinstance(value, (int, float)) and not tf.is_tensor(value):
        raise not_a_loss(value, metric)
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        return value, None
    return tf.reduce_sum(value), tf.size(value)


def pair(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int) -> tuple[float, float]:
    """Call a metric function on a batch and return (sum, count) as floats. Call `pair` eagerly, not in a graph."""
    values = function(targets, outputs) if is_of_keras(function) else function(outputs, targets)
    total, count = _sum_and_count(_as_loss(values), num_samples)
    return float(total), float(count)


def _sum_and_count(loss: tuple[Any, Any], num_samples: Any) -> tuple[Any, Any]:
    """Return (sum, count). A floating-point value keeps its type; the count is float64."""
    value, count = loss
    value = value if value.dtype.is_floating else tf.cast(value, tf.float64)
    if count is None:
        return value * tf.cast(num_samples, value.dtype), tf.cast(num_samples, tf.float64)
    return value, tf.cast(count, tf.float64)


def _is_class_index(outputs: Any, targets: Any) -> bool:
    """Return True if `outputs` are scores [batch, classes] and `targets` are class indices [batch]."""
    return bool(
        tf.is_tensor(outputs) and tf.is_tensor(targets) and outputs.dtype.is_floating and targets.dtype.is_integer
        and outputs.shape.rank == 2 and targets.shape.rank == 1
    )  # fmt: skip
