"""Refuse jobs of several models that an engine does not train, and settings that are for one model."""

from __future__ import annotations

from typing import Any

from distributed.backends.base import Backend
from distributed.backends.keras_kinds import is_model
from distributed.errors import ConfigError
from distributed.state import Job

_OF_ONE_MODEL = {
    "compile": "call torch.compile on the models in their factories, or drop it",
    "layer_rates": "set rates in the optimizers, or drop it",
}


def check_several(backend: Backend[Any], job: Job) -> None:
    """Raise ConfigError if `job` has several models, and the engine or the settings are for one."""
    if not job.names:
        return
    if backend.refuses_several:
        raise ConfigError(f"backend={backend.plan.backend!r} does not take several models: {backend.refuses_several}")
    for name, model in job.model.items():
        refuse_keras(name, model)
    for setting, advice in _OF_ONE_MODEL.items():
        if getattr(backend.config, setting):
            raise ConfigError(f"{setting} does not work with several models: {advice}")


def refuse_keras(name: str, model: Any) -> None:
    """Raise ConfigError if one of several models, given or made by its factory, is a Keras model."""
    if is_model(model):
        raise ConfigError(f"models[{name!r}] is a Keras model: pass torch modules, or train it alone, Trainer(model)")
