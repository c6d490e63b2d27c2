"""Pickle Keras objects as configurations and numbers, for workers whose Keras may run on another engine.

Workaround (Keras 3.15, keras-team/keras#19832; may go when a pickle of a Keras object contains the classes of the script): Keras
writes an archive that names these classes, and the workers of a notebook cannot import them. Here classes are pickled by value, as
cloudpickle does with everything that a main module defines.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from distributed.backends._keras.files import value_of
from distributed.backends.keras_kinds import is_model, is_optimizer
from distributed.errors import ConfigError
from distributed.metrics.of_keras import is_from_keras

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(value: Any) -> bytes:
    """Pickle `value` by value, including Keras models, optimizers, losses and metrics anywhere in it.

    Raises TypeError for a model without a configuration.
    """
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        return _reduced(obj) or super().reducer_override(obj)


def remade(value: Any) -> Any:
    """Return a copy of a Keras model, optimizer, loss or metric, made from its configuration and numbers. Return None
    for anything else.

    Raises TypeError for a model without a configuration.
    """
    reduced = _reduced(value)
    if reduced is None:
        return None
    make, arguments = reduced
    if make is _remade_model:
        arguments = (*arguments[:-1], _with_parts_remade(arguments[-1]))
    return make(*arguments)


def _with_parts_remade(compiled: Any) -> Any:
    """Return a copy of the arguments of `compile`, with its Keras objects made again. The originals of the optimizer
    and the metrics are bound to the first model."""
    if isinstance(compiled, dict):
        return {name: _with_parts_remade(value) for name, value in compiled.items()}
    if isinstance(compiled, (list, tuple)):
        return [_with_parts_remade(value) for value in compiled]
    again = remade(compiled)
    return compiled if again is None else again


def _reduced(obj: Any) -> Reduced | None:
    """Return the function and arguments that make `obj` again, or None if it is not an object of Keras."""
    if is_model(obj):
        return _reduced_model(obj)
    if is_optimizer(obj) or _is_keras(obj, "Loss") or _is_keras(obj, "Metric"):
        with _without_tensorflow():
            return _remade, (_public_class(type(obj)), obj.get_config())
    return None


def _is_keras(value: Any, name: str) -> bool:
    cls = getattr(sys.modules.get("keras"), name, None)
    return isinstance(cls, type) and isinstance(value, cls)


def _public_class(cls: type) -> type:
    """Return the public class of an object. On some engines the object is of a subclass that other engines do not
    have."""
    return next((c for c in cls.__mro__ if c.__name__ == cls.__name__ and ".backend." not in c.__module__), cls)


def _reduced_model(model: Any) -> Reduced:
    try:
        with _without_tensorflow():
            config = model.get_config()
    except NotImplementedError:
        raise TypeError(f"{type(model).__name__} has no get_config()") from None
    custom = {type(layer).__name__: type(layer) for layer in model._flatten_layers() if not is_from_keras(type(layer))}
    compiled = dict(model._compile_config.config) if model.compiled else None
    values = [value_of(variable) for variable in model.variables] if model.built else []
    return _remade_model, (type(model), config, custom, model.get_build_config(), values, compiled)


def _remade(cls: Any, config: dict[str, Any]) -> Any:
    return cls.from_config(config)


def _remade_model(
    cls: Any, config: dict[str, Any], custom: dict[str, type], build: Any, values: list[Any], compiled: Any
) -> Any:
    """Return the model that `_reduced_model` described, with its values, and compiled if it was."""
    import keras
    from keras.src.saving.serialization_lib import SafeModeScope

    try:
        # The model may contain the script's functions.
        with keras.saving.custom_object_scope(custom), SafeModeScope(False):
            model = cls.from_config(config)
            if values and not (model.built and model.variables):
                model.build_from_config(build)
    except (TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the Keras model cannot be built again in the workers ({reason}): pass a function that makes it,"
            " Trainer(make_model), or run the script with 'python -m distributed.cli train --script'"
        ) from error
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)
    if compiled is not None:
        model.compile(**compiled)
    return model


@contextlib.contextmanager
def _without_tensorflow() -> Iterator[None]:
    """Prevent Keras from importing TensorFlow.

    Workaround (Keras 3.15, no upstream issue known; may go when Keras checks objects without this import): Keras
    imports TensorFlow to check whether an object is one of TensorFlow's. If TensorFlow is not loaded, there are none.
    """
    from keras.src.utils.module_utils import tensorflow

    before = tensorflow._available
    if "tensorflow" not in sys.modules:
        tensorflow._available = False
    try:
        yield
    finally:
        tensorflow._available = before
