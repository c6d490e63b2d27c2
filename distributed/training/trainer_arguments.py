"""Check the arguments of a Trainer that are objects: model, optimizer, schedule, functions and callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.callbacks import Callback
from distributed.callbacks.of_keras import as_callbacks
from distributed.errors import ConfigError, nearest

# Hooks of Lightning and what they are called here, where the name that is nearest by its letters means something else.
_OF_LIGHTNING = {
    "on_train_batch_end": "on_step_end", "on_train_epoch_start": "on_epoch_start", "on_train_epoch_end": "on_epoch_end",
    "on_validation_epoch_end": "on_validation_end", "on_before_optimizer_step": "on_before_update", "on_fit_start": "on_train_start",
    "on_fit_end": "on_train_end", "on_exception": "on_error",
}  # fmt: skip


def check_objects(optimizer: Any, scheduler: Any, loss_fn: Any, training_step: Any, num_arguments: int) -> None:
    """Raise ConfigError for an argument that has none of the accepted types.

    `num_arguments` is the number of arguments that `training_step` gets.
    """
    examples = {
        "optimizer": (optimizer, "torch.optim.Adam(model.parameters()), or lambda params: torch.optim.Adam(params)"),
        "scheduler": (scheduler, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"),
    }
    for name, (value, example) in examples.items():
        if isinstance(value, (bytes, Mapping, list, tuple, int, float)):
            raise ConfigError(
                f"{name}={value!r} is a {type(value).__name__}: pass a name, an object or a factory, {name}={example}"
            )
        check_factory(name, value, "optimizer" if name == "scheduler" else "params")
    for name, value in {"loss_fn": loss_fn, "training_step": training_step}.items():
        if value is not None and not callable(value) and not (name == "loss_fn" and isinstance(value, str)):
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}: pass a function")
    wanted = "(model, batch)" if num_arguments == 2 else "(models, batch, update)"
    if training_step is not None and (found := _does_not_take(training_step, num_arguments)):
        raise ConfigError(
            f"training_step is called as training_step{wanted}, and this one takes {found}: change its arguments"
        )


def check_factory(name: str, value: Any, given: str) -> None:
    """Raise ConfigError for a class or a function that cannot be called with `given` alone. `name` is that of the argument."""
    is_factory = isinstance(value, (type, functools.partial)) or inspect.isroutine(value)
    if is_factory and (found := _does_not_take(value, 1)):
        called = getattr(value, "__name__", name)
        raise ConfigError(
            f"{name}={called} is called with one argument, {called}({given}), and it takes {found}: pass a function of one"
            f" argument, lambda {given}: ..."
        )


def check_one_model(model: Any, optimizers: Any, schedulers: Any) -> None:
    """Raise ConfigError if there is no model, or an argument for several models."""
    if model is None:
        raise ConfigError("there is no model: pass a module, or a function that makes one, as the first argument")
    if not callable(model):
        raise ConfigError(f"model is a {type(model).__name__}: pass a module, or a function that makes one")
    for name, value in {"optimizers": optimizers, "schedulers": schedulers}.items():
        if value is not None:
            raise ConfigError(
                f"{name} is for several models: pass {name[:-1]}, or the models by name as models={{...}}"
            )


def read_callbacks(callbacks: Any) -> list[Callback]:
    """Return the callbacks, with those of Keras wrapped.

    Raises ConfigError for an object that is not a callback, or a method `on_...` that is not a hook.
    """
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks is a {type(callbacks).__name__}: pass a list, callbacks=[...]")
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    read = as_callbacks(callbacks)
    for callback in read:
        if isinstance(callback, type):
            raise ConfigError(
                f"callbacks has the class {callback.__name__} instead of an object of it: pass {callback.__name__}()"
            )
        if not isinstance(callback, Callback):
            raise ConfigError(f"callback {callback!r} is not a distributed.Callback: derive its class from it")
        _check_hooks(callback, hooks)
    return read


def _check_hooks(callback: Callback, hooks: Sequence[str]) -> None:
    """Raise ConfigError for a method `on_...` that is not a hook, and for a hook that does not take the arguments of it."""
    kind = type(callback).__name__
    for name in dir(callback):
        if not name.startswith("on_") or not callable(method := getattr(callback, name)):
            continue
        if name not in hooks:
            near = f" (here it is {_OF_LIGHTNING[name]!r})" if name in _OF_LIGHTNING else nearest(name, hooks)
            raise ConfigError(
                f"{kind}.{name} would never be called{near}: the hooks are"
                f" {', '.join(hooks)}; give a method of your own a name without on_"
            )
        wanted = [each for each in inspect.signature(getattr(Callback, name)).parameters if each != "self"]
        if found := _does_not_take(method, len(wanted)):
            raise ConfigError(
                f"{kind}.{name} is called as {name}({', '.join(wanted)}), and it takes {found}: change its arguments"
            )


def _does_not_take(function: Any, count: int) -> str:
    """Return the parameters of a function that cannot be called with `count` arguments by position, or "" if it can be called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return ""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return f"({', '.join(signature.parameters)})"
    return ""


def refuse_lightning(model: Any, loss_fn: Any, training_step: Any) -> None:
    """Raise ConfigError for a LightningModule, or a class of one, whose own step would silently not be used."""
    kind = model if isinstance(model, type) else type(model)
    is_lightning = any(each.__name__ == "LightningModule" for each in kind.__mro__)
    if is_lightning and loss_fn is None and training_step is None:
        raise ConfigError(
            f"{kind.__name__} is a LightningModule, whose training_step and configure_optimizers are not called here: pass"
            " training_step=function(model, batch), or loss_fn, and optimizer to the Trainer"
        )
