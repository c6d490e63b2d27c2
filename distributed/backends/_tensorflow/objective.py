"""From a batch to a loss and metrics, while a graph is traced. What a Keras model means by them is the same on every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from distributed.backends._keras.batches import KerasBatch, unpacked
from distributed.backends._keras.comparison import Comparison
from distributed.backends._keras.losses import compiled_metrics, is_of_keras, metric_value, of_output
from distributed.backends._keras.measures import is_mean
from distributed.backends._tensorflow.over_all import Calls, measure_of
from distributed.backends.failures import no_arguments, not_a_loss, not_called
from distributed.backends.measured import Measured as Metrics
from distributed.backends.parts import Arguments, arguments
from distributed.errors import ConfigError
from distributed.metrics.monitor import check_names

Rows = dict[str, tuple[Any, Any]]  # name -> (sum, count)


@dataclasses.dataclass
class Measured:
    """What one micro-batch gave: a differentiable sum and what it is divided by, both over its samples."""

    total: Any
    count: Any
    is_counted: bool  # whether the count is the loss's own, and not the number of samples
    metrics: Rows
    calls: Calls  # of the metrics over all samples


class Objective:
    """Calls the model on a batch and measures it. What is chosen at the first batch is said once."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any] | None,
        training_step: Callable[..., Any] | None,
        metrics: Mapping[str, Any],
        chosen: Metrics,
        notice: Callable[[str], None],
        dtype: str,
    ) -> None:
        """`metrics`: objects of Keras; what computes the others is in `chosen`."""
        self._model, self._training_step, self._dtype, self._chosen = model, training_step, dtype, chosen
        self._comparison = Comparison(model, loss_fn, notice)
        self._given = {n: f for n, f in metrics.items() if isinstance(f, keras.metrics.Metric)}
        self._metrics: dict[str, tuple[Any, Any, bool]] | None = None  # as `compiled_metrics` gives them

    def __call__(self, batch: Any, num_samples: Any, training: bool) -> Measured:
        """`num_samples` is how many samples count, a scalar."""
        split = "train" if training else "val"
        if self._training_step is not None:
            return self._from_step(self._training_step(self._model, batch), num_samples, split)
        parts = unpacked(batch)
        outputs = tf.nest.map_structure(self._widened, self._model(parts.x, training=training))
        loss = self._compare(parts, outputs, training)
        rows = self._measure(parts, outputs, num_samples, split)
        return dataclasses.replace(
            self._measured(loss, num_samples), metrics=rows, calls=self._calls(parts, outputs, split)
        )

    def build(self, batch: Any) -> None:
        """Make the variables of the model and of what it was compiled with, of a first batch; not in a graph."""
        outputs = self.predict(batch)
        targets = None if self._training_step is not None else unpacked(batch).y
        if targets is None:
            return
        outputs = tf.nest.map_structure(self._widened, outputs)
        self._comparison.build(targets, outputs)
        self._choose_metrics(targets, outputs)

    def form(self, split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a graph for `split` measures: another graph is traced where it has changed."""
        return tuple(self._chosen.functions(split)), tuple(self._chosen.wholes.names(split))

    def predict(self, batch: Any) -> Any:
        """The model's outputs for `batch` without its targets."""
        return self._model(unpacked(batch).x, training=False)

    def _widened(self, output: Any) -> Any:
        """Losses and metrics are computed in the run's own element type, also where the model computes in a shorter one."""
        if tf.is_tensor(output) and output.dtype in (tf.bfloat16, tf.float16):
            wide = tf.cast(output, self._dtype)
            if (mask := getattr(output, "_keras_mask", None)) is not None:
                wide._keras_mask = mask
            return wide
        return output

    # losses

    def _compare(self, parts: KerasBatch, outputs: Any, training: bool) -> tuple[Any, Any]:
        """(value, count) with the regularisation of the model's layers; count None: a mean over samples."""
        value, is_whole = self._comparison(parts, outputs, training)
        return _as_loss(value) if is_whole else self._regularized(_as_loss(value))

    def _regularized(self, loss: tuple[Any, Any]) -> tuple[Any, Any]:
        value, count = loss
        if self._model.losses:
            more = tf.add_n([tf.cast(each, value.dtype) for each in self._model.losses])
            value += more if count is None else more * tf.cast(count, value.dtype)
        return value, count

    def _from_step(self, value: Any, num_samples: Any, split: str) -> Measured:
        metrics: Rows = {}
        given: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
        calls = {}
        for name in filter(self._chosen.is_call, self._chosen.wholes.names(split)):
            if name not in given:
                raise no_arguments(name)
            calls[name] = arguments(given[name])
        for name in self._chosen.functions(split).keys() - given.keys():
            raise not_called(name)
        if isinstance(value, Mapping):
            if "loss" not in value:
                raise ConfigError(f"training_step returned a dict without 'loss' ({', '.join(value)}): add the loss")
            check_names(name for name in value if name != "loss")
            means = {name: each for name, each in value.items() if name != "loss" and not self._chosen.is_call(name)}
            metrics = {name: _row(_as_loss(each, name), num_samples) for name, each in means.items()}
            value = value["loss"]
        elif hasattr(value, "loss"):
            value = value.loss
        if value is None:
            raise ConfigError("training_step returned None: return the loss")
        return dataclasses.replace(self._measured(_as_loss(value), num_samples), metrics=metrics, calls=calls)

    def _measured(self, loss: tuple[Any, Any], num_samples: Any) -> Measured:
        if not loss[0].dtype.is_floating:
            raise ConfigError(
                f"the loss is {loss[0].dtype.name}, which has no gradient: return a floating-point tensor"
            )
        return Measured(*_row(loss, num_samples), loss[1] is not None, {}, {})

    # metrics

    def _measure(self, parts: KerasBatch, outputs: Any, num_samples: Any, split: str) -> Rows:
        if parts.y is None:
            return {}
        rows: Rows = {}
        for name, (metric, place, is_weighted) in self._choose_metrics(parts.y, outputs).items():
            weight = parts.weight if is_weighted else None
            if not is_mean(metric):
                continue
            rows[name] = metric_value(metric, of_output(parts.y, place), of_output(outputs, place), weight)
        for name, function in self._chosen.functions(split).items():
            values = function(parts.y, outputs) if is_of_keras(function) else function(outputs, parts.y)
            rows[name] = _row(_as_loss(values, name), num_samples)
        if "accuracy" not in rows and not self._chosen.wholes.has("accuracy") and _is_class_index(outputs, parts.y):
            hits = tf.argmax(outputs, axis=1, output_type=tf.int64) == tf.cast(parts.y, tf.int64)
            rows["accuracy"] = tf.reduce_sum(tf.cast(hits, tf.float64)), num_samples
        return rows

    def _calls(self, parts: KerasBatch, outputs: Any, split: str) -> Calls:
        if parts.y is None:
            return {}
        calls: dict[str, Arguments] = {}
        chosen = self._choose_metrics(parts.y, outputs)
        for name in self._chosen.wholes.names(split):
            _, place, is_weighted = chosen.get(name, (None, None, False))
            weight = {"sample_weight": parts.weight} if is_weighted and parts.weight is not None else {}
            calls[name] = Arguments((of_output(outputs, place), of_output(parts.y, place)), weight)
        return calls

    def _choose_metrics(self, targets: Any, outputs: Any) -> dict[str, tuple[Any, Any, bool]]:
        if self._metrics is None:
            given = {name: (metric, None, False) for name, metric in self._given.items()}
            self._metrics = given | compiled_metrics(self._model, targets, outputs)
            for name, (metric, _, _) in self._metrics.items():
                if not is_mean(metric):
                    self._chosen.wholes.add(name, lambda metric=metric: measure_of(metric))  # type: ignore[misc]
        return self._metrics


def _as_loss(value: Any, metric: str | None = None) -> tuple[Any, Any]:
    """(value, count) of the return forms of a loss or metric; count None: a mean over the batch's samples. An error names
    `metric`, where the value is that of one."""
    if isinstance(value, tuple) and len(value) == 2:
        return tf.reshape(tf.convert_to_tensor(value[0]), ()), tf.reshape(tf.convert_to_tensor(value[1]), ())
    if not isinstance(value, (int, float)) and not tf.is_tensor(value):
        raise not_a_loss(value, metric)
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        return value, None
    return tf.reduce_sum(value), tf.size(value)


def pair(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int) -> tuple[float, float]:
    """(sum, count) of a metric function, not in a graph."""
    values = function(targets, outputs) if is_of_keras(function) else function(outputs, targets)
    total, count = _row(_as_loss(values), num_samples)
    return float(total), float(count)


def _row(loss: tuple[Any, Any], num_samples: Any) -> tuple[Any, Any]:
    """(sum, count): the value in its own type where it is floating, the count in float64."""
    value, count = loss
    value = value if value.dtype.is_floating else tf.cast(value, tf.float64)
    if count is None:
        return value * tf.cast(num_samples, value.dtype), tf.cast(num_samples, tf.float64)
    return value, tf.cast(count, tf.float64)


def _is_class_index(outputs: Any, targets: Any) -> bool:
    """Whether `outputs` are [batch, classes] scores and `targets` [batch] class indices."""
    return bool(
        tf.is_tensor(outputs) and tf.is_tensor(targets) and outputs.dtype.is_floating and targets.dtype.is_integer
        and outputs.shape.rank == 2 and targets.shape.rank == 1
    )  # fmt: skip
