"""Check the arguments of a Trainer with several models, and make its job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed.errors import ConfigError, nearest
from distributed.state import Job
from distributed.training.trainer_arguments import check_factory

_EXAMPLE = "models={'g': make_g, 'd': make_d}"
_STEP = "training_step=step, with a function step(models, batch, update) that calls update(NAME, loss)"


def several_job(
    models: Any,
    optimizers: Any,
    schedulers: Any,
    training_step: Callable[..., Any] | None,
    metrics: Mapping[str, Any],
    *,
    of_one_model: Mapping[str, Any],
) -> Job:
    """Return the job that trains `models`.

    Args:
        models: modules or factories by name.
        optimizers: for each model that is trained, the name of an optimizer, an optimizer, a factory, or None for the
            default. None means that all models are trained with the default.
        schedulers: schedules of some of these models, in the same forms.
        training_step: the function `(models, batch, update)`.
        metrics: the declared metrics.
        of_one_model: the arguments of a Trainer that are for one model, by name.

    Raises:
        ConfigError: an argument is missing or wrong.
    """
    for name, value in of_one_model.items():
        if value is not None:
            raise ConfigError(f"{name} is for one model: with models, pass {_instead(name)}")
    if not isinstance(models, Mapping) or not models:
        raise ConfigError(f"models={models!r}: pass modules or factories by name, {_EXAMPLE}")
    for name, model in models.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"models: {name!r} is not a name: use letters, digits and _, as in {_EXAMPLE}")
        if not callable(model):
            raise ConfigError(
                f"models[{name!r}] is a {type(model).__name__}: pass a module, or a function that makes one"
            )
    if training_step is None:
        raise ConfigError(f"models needs {_STEP}")
    trained = dict.fromkeys(models) if optimizers is None else _by_name("optimizers", optimizers, models)
    if not trained:
        raise ConfigError("optimizers is empty, so that no model would be trained: name one, or drop it")
    schedules = {} if schedulers is None else _by_name("schedulers", schedulers, trained)
    return Job(dict(models), trained, schedules, None, training_step, metrics, tuple(models))


def _by_name(argument: str, given: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{argument} is a {type(given).__name__}: pass them by the names of models, {argument}={{...}}"
        )
    what = "trained model" if argument == "schedulers" else "model"
    for name, value in given.items():
        if name not in known:
            raise ConfigError(
                f"{argument} names {name!r}, but there is no such {what}{nearest(str(name), known)}: use {', '.join(known)}"
            )
        if value is not None and not isinstance(value, str) and not callable(value) and not hasattr(value, "step"):
            raise ConfigError(f"{argument}[{name!r}] is a {type(value).__name__}: pass a name, an object or a factory")
        check_factory(f"{argument}[{name!r}]", value, "optimizer" if argument == "schedulers" else "params")
    return dict(given)


def _instead(name: str) -> str:
    return {
        "model": "the model as an entry of models",
        "optimizer": "optimizers={NAME: ...}",
        "scheduler": "schedulers={NAME: ...}",
        "loss_fn": _STEP,
    }[name]
