"""Build the user's Keras model, give it the element types of the run, and check its layers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from distributed.backends._keras import files
from distributed.backends._keras.floats import floats_of
from distributed.backends._keras.losses import in_dtype
from distributed.backends._tensorflow.replicas import Replicas
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError

_POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


def policy_of(config: DistributedConfig, mixed_precision: str) -> str:
    """Return the name of Keras's dtype policy for a run, such as "mixed_bfloat16"."""
    return _POLICIES.get(mixed_precision, config.dtype)


def build_model(model_or_factory: Any, config: DistributedConfig, policy: str, replicas: Replicas | None = None) -> Any:
    """Return the given model, or the model that the given factory makes after seeding, with the dtype policy `policy`.

    A model with another policy, or with variables that do not belong to `replicas`, is made again from its own
    configuration with the same weights.
    """
    if isinstance(model_or_factory, keras.Model):
        is_right = _follows(model_or_factory, policy) and (replicas is None or replicas.holds(model_or_factory))
        return model_or_factory if is_right else _rebuilt(model_or_factory, policy)
    states = random.getstate(), numpy.random.get_state()
    try:
        keras.utils.set_random_seed(config.seed & 0xFFFFFFFF)
        with _default(policy):
            model = model_or_factory()
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
    if not isinstance(model, keras.Model):
        raise ConfigError(f"the model factory returned a {type(model).__name__}: return a keras.Model")
    return model


@contextlib.contextmanager
def _default(policy: str) -> Iterator[None]:
    """Give new layers the dtype policy `policy` within the block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _follows(model: Any, policy: str) -> bool:
    """Return True if all layers have the dtype policy `policy`. For float64 the inputs must be float64 too."""
    read = {layer.dtype for layer in model._flatten_layers() if isinstance(layer, keras.layers.InputLayer)}
    return _policy_names(model) <= {policy} and not (policy == "float64" and "float32" in read)


def _policy_names(model: Any) -> set[str]:
    return {
        layer.dtype_policy.name for layer in model._flatten_layers() if not isinstance(layer, keras.layers.InputLayer)
    }


def _rebuilt(model: Any, policy: str) -> Any:
    """Return a copy of `model` with the dtype policy `policy`, the same values, and the same compiled loss and
    metrics."""
    try:
        content = _with_policy(keras.saving.serialize_keras_object(model), policy)
        content.pop("compile_config", None)
        with _default(policy):
            made = keras.saving.deserialize_keras_object(content, safe_mode=False)
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"the model cannot be made again in {policy}{_where()} ({reason}): pass a factory, Trainer(lambda: MyModel(), ...)"
        ) from None
    if model.built and not made.built:
        made.build_from_config(model.get_build_config() or {})
    if len(made.variables) != len(model.variables) or not _follows(made, policy):
        raise ConfigError(
            f"the model does not follow {policy} (a layer's own dtype, or a configuration without its layers): pass a factory,"
            " Trainer(lambda: MyModel(), ...)"
        )
    for ours, theirs in zip(model.variables, made.variables, strict=True):
        theirs._path = ours.path  # a checkpoint uses the names of the user's own model
    copy_values(model, made)
    if model.compiled and model._compile_loss is not None:
        _compile_alike(model, made)
    return made


def _where() -> str:
    return " with a copy on each device" if tf.distribute.has_strategy() else ""


def _compile_alike(model: Any, made: Any) -> None:
    """Compile `made` with the loss and metrics of `model`. The optimizer of `made` is never used."""
    loss, metrics = model._compile_loss, model._compile_metrics
    made.compile(
        optimizer="sgd",
        loss=tf.nest.map_structure(lambda each: in_dtype(each, keras.config.floatx()), loss._user_loss),
        loss_weights=loss._user_loss_weights,
        metrics=None if metrics is None else metrics._user_metrics,
        weighted_metrics=None if metrics is None else metrics._user_weighted_metrics,
    )


def _with_policy(content: Any, policy: str) -> Any:
    """Return a serialized model with the dtype policy of every layer replaced."""
    if isinstance(content, dict):
        if content.get("class_name") == "DTypePolicy":
            return {**content, "config": {"name": policy}}
        if content.get("class_name") == "InputLayer" and policy == "float64" and "float" in content["config"]["dtype"]:
            return {**content, "config": {**content["config"], "dtype": policy}}  # the batch is cast to this type
        return {key: _with_policy(value, policy) for key, value in content.items()}
    return [_with_policy(value, policy) for value in content] if isinstance(content, list) else content


def copy_values(source: Any, target: Any) -> None:
    """Copy the values of the variables of `source` to those of `target`."""
    for ours, theirs in zip(source.variables, target.variables, strict=True):
        theirs.assign(tf.cast(ours.value, theirs.dtype))


def statistics(model: Any) -> list[Any]:
    """Return the moving averages of a model as TensorFlow variables."""
    return [v.value for v in model.non_trainable_variables if "float" in str(v.dtype)]


def with_weights(model_or_factory: Any, directory: Path, config: DistributedConfig, policy: str) -> Any:
    """Return a model with the weights of a checkpoint.

    The returned model may be a copy of the user's own model, with another dtype policy. The weights are then copied to
    the user's model too.
    """
    with floats_of(config.dtype):
        built = build_model(model_or_factory, config, policy)
    files.load_model(built, directory)
    give_back(built, model_or_factory)
    return built


def give_back(trained: Any, original: Any) -> None:
    """Copy the trained weights to `original`, the user's own model, if `trained` is another model that was made from
    it."""
    if isinstance(original, keras.Model) and original is not trained:
        if not original.built and trained.built:
            original.build_from_config(trained.get_build_config())
        copy_values(trained, original)


def build(model: Any, batch: Any, predict: Callable[[Any], Any]) -> None:
    """Create the variables of a model that creates them at its first call. `predict` calls the model."""
    if not model.built:
        predict(tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:1]), batch))


def check_model(model: Any, data_parallel_size: int) -> None:
    """Raise ConfigError for layers with options that have no effect in our step."""
    for layer in model._flatten_layers():
        if data_parallel_size > 1 and getattr(layer, "synchronized", False):
            raise ConfigError(
                f"{layer.name} has synchronized=True, which needs Keras' own training loop: set it to False, or train in one"
                " process on one device"
            )
