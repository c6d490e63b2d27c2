"""Compute metrics over all samples on TensorFlow: functions of all outputs, Keras metrics and other metric objects."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy
import tensorflow as tf

from distributed.backends._keras import measures
from distributed.backends._tensorflow.outputs import joined
from distributed.backends.failures import not_a_number
from distributed.backends.over_all import Measure, OutputsMeasure, Update, driven
from distributed.backends.parts import Arguments, Part, mapped
from distributed.checkpoints.tensor_file import RawTensor
from distributed.errors import ConfigError
from distributed.metrics.over_all import (
    OverAll,
    call_sklearn,
    has_state,
    is_of_keras,
    is_of_sklearn,
    takes_targets_first,
)

_WORDS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
Calls = Mapping[str, Arguments]  # metric -> its arguments for a batch


class TensorFlowEngine:
    """Convert TensorFlow tensors, see `distributed.backends.over_all.MetricEngine`. The host keeps arrays; functions
    get tensors."""

    def joined(self, updates: Sequence[Update]) -> Arguments:
        """Return the arguments for all samples of `updates`."""
        parts = [
            (update, rank, (tuple(value), n))
            for update, each in enumerate(updates)
            for rank, (value, n) in enumerate(each)
        ]
        args, named = joined([parts])
        whole: Arguments = mapped(Arguments(tuple(args), dict(named)), _as_tensor)
        return whole

    def to_raw(self, name: str, leaf: Any) -> RawTensor | None:
        """Return an array as bytes, or None for any other value."""
        words = {dtype: word for word, dtype in _WORDS.items()}
        if not isinstance(leaf, numpy.ndarray) or leaf.dtype.name not in words:
            return None
        return RawTensor(name, words[leaf.dtype.name], leaf.shape, lambda: numpy.ascontiguousarray(leaf).tobytes())

    def from_raw(self, word: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return the array that `to_raw` was given, or one that another engine has written. bfloat16 becomes
        float32."""
        if word == "BF16":
            wide = numpy.frombuffer(data, numpy.uint16).astype(numpy.uint32) << 16
            return wide.view(numpy.float32).reshape(shape)
        return numpy.frombuffer(data, _WORDS[word]).reshape(shape).copy()

    def number(self, name: str, value: Any) -> float:
        """Return a number as float. Tensors and arrays must have exactly one element."""
        array = numpy.asarray(value)
        if array.size != 1 or array.dtype.kind not in "biuf":
            raise not_a_number(name, value)
        return float(array.reshape(()))


ENGINE = TensorFlowEngine()


def is_whole(metric: Any) -> bool:
    """Return True if `metric` is computed over all samples."""
    return isinstance(metric, OverAll) or (has_state(metric) and not (is_of_keras(metric) and measures.is_mean(metric)))


def measure_of(metric: Any) -> Measure:
    """Return the Measure that computes `metric`."""
    if isinstance(metric, OverAll):
        return OutputsMeasure(
            lambda updates: _called(metric, updates), lambda call: _kept(metric, call), training=metric.training
        )
    if is_of_keras(metric):
        return measures.measure_of(metric, ENGINE, contextlib.nullcontext, on_host)
    if type(metric).__module__.startswith("torchmetrics."):
        raise ConfigError(
            f"{type(metric).__name__} is a torch metric, but the model is a TensorFlow model: use one of keras.metrics, or"
            " distributed.over_all(function)"
        )
    own = copy.deepcopy(metric)
    return OutputsMeasure(lambda updates: driven(own, updates, ENGINE, ("reset", "update", "compute")), on_host)


def measure_of_function(function: Callable[..., Any], *, training: bool) -> Measure:
    """Return the Measure that computes a plain function over all samples."""
    return measure_of(OverAll(function, training=training))


def parts_of(calls: Sequence[tuple[Calls, int]], key: tuple[int, int]) -> dict[str, list[Part]]:
    """Return for each metric the parts of one micro-batch, one part for each replica with samples that count."""
    parts: dict[str, list[Part]] = {}
    for replica, (found, number) in enumerate(calls):
        for name, call in found.items() if number else ():
            parts.setdefault(name, []).append(Part(key, number, call, replica))
    return parts


def _called(metric: OverAll, updates: Sequence[Update]) -> Any:
    args, named = ENGINE.joined(updates)
    if takes_targets_first(metric.function):
        args = (args[1], args[0], *args[2:])
    if is_of_sklearn(metric.function):
        return call_sklearn(metric, mapped(args, _as_array), mapped(named, _as_array))
    value = metric.function(*args, **named, **metric.arguments)
    is_each = tf.is_tensor(value) and value.shape.rank  # a value for each sample, as a loss may be
    return (tf.reduce_sum(value), tf.size(value)) if is_each else value


def _kept(metric: OverAll, call: Arguments) -> Arguments:
    if metric.transform is not None and call.args:
        outputs, *more = call.args
        if isinstance(metric.transform, str):
            axis = {} if metric.transform == "sigmoid" else {"axis": -1}
            outputs = getattr(keras.ops, metric.transform)(outputs, **axis)
        else:
            outputs = metric.transform(outputs)
        call = call._replace(args=(outputs, *more))
    return on_host(call)


def on_host(call: Arguments) -> Arguments:
    """Return the arguments of a metric as arrays on the host."""
    kept: Arguments = mapped(call, _as_array)
    return kept


def _as_array(leaf: Any) -> Any:
    return leaf.numpy() if tf.is_tensor(leaf) else leaf


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, numpy.ndarray) else leaf
