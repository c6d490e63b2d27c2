"""Compute losses and metrics of Keras as sums and counts, so that the result does not depend on how a batch is split.
Works on any engine."""

from __future__ import annotations

import copy
from typing import Any

from distributed.errors import ConfigError
from distributed.metrics.of_keras import is_from_keras, keras_classes

Pair = tuple[Any, Any]  # (sum, count)
_EXAMPLE = "give one, for example Trainer(model, loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True))"


def is_of_keras(loss_fn: Any) -> bool:
    """Return True if `loss_fn` is a loss object, function or name of Keras, which takes (targets, outputs)."""
    if isinstance(loss_fn, str):
        return True
    return is_from_keras(loss_fn) or any(cls.__name__ == "Loss" for cls in keras_classes(loss_fn))


class KerasLoss:
    """Compute `loss(targets, outputs, sample_weight)` as a mean over samples, or as (sum, count) if its mean is not
    over samples, for example over tokens."""

    def __init__(self, loss: Any, factor: float | None = None) -> None:
        import keras

        self._loss = loss if isinstance(loss, keras.losses.Loss) else _wrapped(loss)
        compute_in_floatx(self._loss)
        self._factor = 1.0 if factor is None else factor
        if self._loss.reduction == "sum":
            name = type(self._loss).__name__
            raise ConfigError(
                f"loss_fn={name}(reduction='sum') makes gradients grow with the batch: use {name}(), which averages"
            )

    def __call__(self, targets: Any, outputs: Any, weight: Any = None) -> Any:
        """Return a mean, or (sum, count) for masked outputs, outputs of more than two dimensions, and weighted
        means."""
        if targets is None:
            raise ConfigError("the batch has no targets, so there is nothing to compare the outputs with: " + _EXAMPLE)
        self._loss = in_dtype(self._loss, _floatx())
        mask = getattr(outputs, "_keras_mask", None)
        by_weight = self._loss.reduction == "mean_with_sample_weight" and weight is not None
        if mask is None and not by_weight and len(getattr(outputs, "shape", ())) <= 2:
            return self._factor * self._loss(targets, outputs, weight)
        return self._counted(targets, outputs, weight, mask, by_weight)

    def _counted(self, targets: Any, outputs: Any, weight: Any, mask: Any, by_weight: bool) -> Pair:
        """Return the sum of the loss and the count by which Keras divides it: the number of elements, or of elements
        that are not masked, or the sum of their weights."""
        import keras

        before, self._loss.reduction = self._loss.reduction, None
        try:
            values = self._loss(targets, outputs, weight)
        finally:
            self._loss.reduction = before
        counted = keras.ops.ones_like(values)
        if mask is not None:
            counted = _along(keras.ops.cast(mask, values.dtype), values)
        if by_weight:
            counted = counted * _along(keras.ops.cast(weight, values.dtype), values)
        return self._factor * keras.ops.sum(values), keras.ops.sum(counted)


def compute_in_floatx(loss_or_metric: Any) -> None:
    """Make a float32 loss or metric compute in float64, if float64 is the current float type of Keras."""
    import keras

    if keras.config.floatx() == "float64" and loss_or_metric.dtype == "float32":
        loss_or_metric._dtype_policy = keras.DTypePolicy("float64")
        loss_or_metric._dtype = "float64"


def in_dtype(loss: Any, dtype: str) -> Any:
    """Return a loss that computes in `dtype`.

    Workaround (Keras 3.15, no upstream issue known; may go when the type of a loss can be changed): a loss rounds its
    arguments to the float type that was set when the loss was created.
    """
    import keras

    if not isinstance(loss, keras.losses.Loss) or loss.dtype == dtype:
        return loss
    other: Any = copy.copy(loss)
    other._dtype_policy, other._dtype = keras.dtype_policies.DTypePolicy(dtype), dtype
    return other


def _floatx() -> str:
    import keras

    dtype: str = keras.config.floatx()
    return dtype


def _along(value: Any, like: Any) -> Any:
    """Return `value` broadcast to the shape of `like`. The dimensions of `value` are the first ones of `like`,
    and possibly one more of size 1."""
    import keras

    if len(value.shape) == len(like.shape) + 1:
        value = keras.ops.squeeze(value, -1)
    while len(value.shape) < len(like.shape):
        value = keras.ops.expand_dims(value, -1)
    return keras.ops.broadcast_to(value, keras.ops.shape(like))


def _wrapped(function: Any) -> Any:
    """Return a loss object for a name or function of Keras."""
    import keras

    found = keras.losses.get(function)
    if isinstance(found, keras.losses.Loss):
        return found

    class Wrapped(keras.losses.Loss):  # type: ignore[misc]
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return found(*_of_one_rank(y_true, y_pred))

    return Wrapped(name=getattr(found, "__name__", None))


def _of_one_rank(targets: Any, outputs: Any) -> tuple[Any, Any]:
    """Return both with the same number of dimensions, as `compile` does, if one has a last dimension of 1 that the other lacks."""
    import keras

    here, there = len(targets.shape), len(outputs.shape)
    if here == 1 and there == 2 and outputs.shape[-1] == 1:
        return keras.ops.expand_dims(targets, -1), outputs
    if there == 1 and here == 2 and targets.shape[-1] == 1:
        return targets, keras.ops.expand_dims(outputs, -1)
    if here == there + 1 and targets.shape[-1] == 1:
        return keras.ops.squeeze(targets, -1), outputs
    if there == here + 1 and outputs.shape[-1] == 1:
        return targets, keras.ops.squeeze(outputs, -1)
    return targets, outputs


def default_loss(model: Any, outputs: Any, targets: Any) -> tuple[Any, str]:
    """Return the default loss and the reason for it: cross-entropy for class indices, mean squared error for floats of
    the outputs' shape.

    The choice is the same on every engine. Raises ConfigError if neither loss fits.
    """
    import keras

    here, there = _shape(outputs), _shape(targets)
    is_index = there is not None and "int" in keras.backend.standardize_dtype(targets.dtype)
    if here is not None and is_index and len(here) == 2 and here[1] > 1 and there in (here[:1], (*here[:1], 1)):
        is_logits = not _ends_in_softmax(model)
        why = "logits, as no softmax ends the model" if is_logits else "probabilities, as a softmax ends the model"
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=is_logits)
        return loss, f"cross-entropy of {why}, because the targets are class indices"
    if here is not None and here == there and not is_index:
        return keras.losses.MeanSquaredError(), (
            "mean squared error, because the targets are floats of the outputs' shape"
        )
    raise ConfigError(f"no loss_fn given, and outputs {here} with targets {there} do not determine a loss: {_EXAMPLE}")


def _shape(value: Any) -> tuple[int, ...] | None:
    shape = getattr(value, "shape", None)
    return None if shape is None else tuple(shape)


def _ends_in_softmax(model: Any) -> bool:
    import keras

    outputs = getattr(model, "outputs", None)
    history = getattr(outputs[0], "_keras_history", None) if outputs else None
    layers = getattr(model, "layers", [])
    last = history.operation if history is not None else layers[-1] if layers else None
    is_own = getattr(last, "activation", None) is keras.activations.softmax
    return is_own or isinstance(last, keras.layers.Softmax)


def compiled_metrics(model: Any, targets: Any, outputs: Any) -> dict[str, tuple[Any, Any, bool]]:
    """Return the metrics of a compiled model by name: (metric, (position, name) of its output or None, whether it is
    weighted)."""
    compiled = getattr(model, "_compile_metrics", None)
    if compiled is None:
        return {}
    if not compiled.built:
        compiled.build(targets, outputs)
    names = compiled._resolved_output_names or range(len(compiled._flat_metrics))
    found: dict[str, tuple[Any, Any, bool]] = {}
    for is_weighted, lists in ((False, compiled._flat_metrics), (True, compiled._flat_weighted_metrics)):
        for position, each in zip(enumerate(names), lists, strict=True):
            for metric in getattr(each, "metrics", ()):
                name = f"{each.output_name}_{metric.name}" if each.output_name else metric.name
                name = f"weighted_{name}" if name in found else name
                found[name] = (metric, position if len(lists) > 1 else None, is_weighted)
    return found


def metric_value(metric: Any, targets: Any, outputs: Any, weight: Any = None) -> Pair:
    """Return (sum, count) of one batch for a metric that is a mean."""
    metric.reset_state()
    metric.update_state(targets, outputs, sample_weight=weight)
    return metric.total + 0, metric.count + 0


def of_output(value: Any, position: Any) -> Any:
    """Return the targets or outputs `value` of one output of the model, given by `position` = (number, name). Return
    all of `value` if `position` is None."""
    import keras

    if position is None or value is None:
        return value
    number, name = position
    if isinstance(value, dict):
        return value[name] if name in value else list(value.values())[number]
    return keras.tree.flatten(value)[number]
