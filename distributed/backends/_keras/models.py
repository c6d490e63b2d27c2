"""Check that Keras models and optimizers work with our step, and choose the default optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from distributed.backends._keras.named_optimizers import named_optimizer
from distributed.backends._keras.names import trainable_variables
from distributed.backends.keras_kinds import is_optimizer, is_schedule
from distributed.config.optimization import NamedOptimizer
from distributed.errors import ConfigError
from distributed.metrics.of_keras import keras_classes

_OWN_STEP = "train_step"
_FIX = "pass a Keras optimizer or a factory, optimizer=lambda variables: keras.optimizers.Adam(1e-3)"


def schedule_kind(there: str | None, here: str | None) -> str | None:
    """Return the name of the schedule's class in a checkpoint. The checkpoint names it `there`; the run's own is
    `here`.

    Early checkpoints of the torch backends name every Keras schedule LearningRateSchedule. Such a name counts as
    `here`.
    """
    return here if here and there == "LearningRateSchedule" else there


def check_engine(wanted: str, backend: str, *, here: bool, otherwise: str = "choose another backend") -> None:
    """Raise ConfigError if Keras runs on another engine than `wanted`. The engine cannot change after keras is
    imported.

    Args:
        wanted: the engine that the backend needs.
        backend: name of the backend.
        here: whether Keras runs in this process. If not, the engine is the one that KERAS_BACKEND selects in workers.
        otherwise: an alternative fix, for the message.
    """
    import keras

    from_environ = os.environ.get("KERAS_BACKEND")
    found = keras.backend.backend() if here else from_environ or wanted
    if found == wanted:
        return
    if from_environ:
        raise ConfigError(
            f"KERAS_BACKEND={from_environ!r} does not fit backend={backend!r}, which needs Keras on {wanted!r}: set"
            f" KERAS_BACKEND={wanted}, or {otherwise}"
        )
    raise ConfigError(
        f"Keras runs on {found!r} in this process, and backend={backend!r} needs it on {wanted!r}: set KERAS_BACKEND={wanted}"
        f" before keras is imported, or start the script with 'python -m distributed.cli train --backend {backend}'"
    )


def check_model(model: Any) -> None:
    """Raise ConfigError for parts of a model that our step would ignore."""
    base = keras_classes(model)[0]
    if getattr(type(model), _OWN_STEP) is not getattr(base, _OWN_STEP):
        raise ConfigError(
            f"{type(model).__name__}.train_step is not called, because the Trainer has its own step: override compute_loss, or pass"
            " training_step=lambda model, batch: loss"
        )


def chosen_optimizer(optimizer_or_factory: Any, model: Any, learning_rate: float, notice: Callable[[str], None]) -> Any:
    """Return the built Keras optimizer for a built `model`: the given one, the one that settings name, the compiled one,
    or AdamW with torch's defaults.

    `optimizer_or_factory` may be a factory, which is called with the trainable variables. Raises ConfigError if the optimizer does not
    work with our step.
    """
    import keras

    variables = list(model.trainable_variables)
    if not variables:
        raise ConfigError(
            "the model has no trainable variable, so there is nothing to train: pass another model, or unfreeze a layer"
        )
    optimizer = optimizer_or_factory
    if optimizer_or_factory is None:
        optimizer = getattr(model, "optimizer", None)
    elif isinstance(optimizer_or_factory, NamedOptimizer):
        optimizer = named_optimizer(optimizer_or_factory, trainable_variables(model), notice)
    elif not is_optimizer(optimizer_or_factory) and callable(optimizer_or_factory):
        optimizer = _made(optimizer_or_factory, variables, "optimizer", _FIX)
    if optimizer is None:
        optimizer = keras.optimizers.AdamW(learning_rate, weight_decay=1e-2, epsilon=1e-8)
    if not is_optimizer(optimizer):
        raise ConfigError(f"the optimizer is a {type(optimizer).__name__}, but the model is a Keras model: {_FIX}")
    _check_optimizer(optimizer)
    if not optimizer.built:
        optimizer.build(variables)
    elif {id(v) for v in optimizer._trainable_variables} != {id(v) for v in variables}:
        raise ConfigError(
            "the optimizer was built for other variables than this model's: pass a new one, or a factory,"
            " optimizer=lambda variables: keras.optimizers.Adam(1e-3)"
        )
    return optimizer


def _made(factory: Any, argument: Any, name: str, fix: str) -> Any:
    """Call the factory. A TypeError becomes a ConfigError, because optimizers and schedules of torch raise TypeError
    for arguments of Keras."""
    try:
        return factory(argument)
    except TypeError as error:
        raise ConfigError(f"the {name} factory failed when it was called for a Keras model ({error}): {fix}") from error


def set_schedule(optimizer: Any, scheduler: Any) -> None:
    """Give `optimizer` the schedule `scheduler`, a LearningRateSchedule or a factory of one. Raises ConfigError for
    anything else."""
    fix = "pass a schedule of keras.optimizers.schedules"
    schedule = scheduler
    if not is_schedule(scheduler) and callable(scheduler):
        schedule = _made(scheduler, optimizer, "scheduler", fix)
    if not is_schedule(schedule):
        raise ConfigError(f"the scheduler is a {type(schedule).__name__}, but the model is a Keras model: {fix}")
    optimizer.learning_rate = schedule


def _check_optimizer(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if name == "LossScaleOptimizer":
        raise ConfigError(
            "LossScaleOptimizer scales the loss a second time: pass its inner optimizer, and mixed_precision"
        )
    refused = {
        "gradient_accumulation_steps": "set gradient_accumulation_steps of the Trainer instead",
        "loss_scale_factor": "set mixed_precision='fp16' of the Trainer instead, which scales the loss",
    }
    for setting, fix in refused.items():
        if (value := getattr(optimizer, setting, None)) is not None:
            raise ConfigError(f"{name}({setting}={value}) does not work with the Trainer's step: {fix}")
    if optimizer.use_ema and not optimizer.ema_overwrite_frequency:
        raise ConfigError(
            f"{name}(use_ema=True) has no effect without ema_overwrite_frequency, as only Keras's own fit writes the averages"
            " back at its end: set ema_overwrite_frequency"
        )


def batch_dependent(model: Any) -> list[str]:
    """Return the names of layers whose output depends on how a batch is split: batch statistics and dropout."""
    names = []
    for layer in model._flatten_layers():
        draws = bool(getattr(layer, "_seed_generators", None)) and getattr(layer, "rate", 1) != 0
        if draws or type(layer).__name__ == "BatchNormalization":
            names.append(f"{layer.name} ({type(layer).__name__})")
    return names
