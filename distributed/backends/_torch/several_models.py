"""Hold several models by name in one module, and build it from the models and factories that the user gave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from distributed.backends._torch.by_name import ByName
from distributed.backends.several import refuse_keras
from distributed.errors import ConfigError


class SeveralModels(ByName[torch.nn.Module], torch.nn.Module):
    """Hold several models by name, as a mapping. A parameter has the name `MODEL.PARAMETER`.

    Models that are not trained stay in evaluation mode.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._by_name = dict(models)
        for name, model in models.items():
            self.add_module(name, model)
        self._trained: frozenset[str] = frozenset(models)
        self._frozen: set[str] = set()  # names of the parameters that `freeze` has frozen

    @property
    def names_of_models(self) -> list[str]:
        """The names of the models, in order."""
        return [*self._by_name]

    def train_only(self, names: Collection[str]) -> None:
        """Freeze the models that are not in `names`, and keep them in evaluation mode."""
        self._trained = frozenset(names)
        self.freeze()

    def freeze(self) -> None:
        """Freeze the models that are not trained."""
        for name, parameter in self.named_parameters():
            if name.partition(".")[0] not in self._trained and parameter.requires_grad:
                self._frozen.add(name)
                parameter.requires_grad_(False)

    def thaw(self) -> None:
        """Undo `freeze`. Parameters that the user has frozen stay so."""
        for name, parameter in self.named_parameters():
            if name in self._frozen:
                parameter.requires_grad_(True)

    def train(self, mode: bool = True) -> SeveralModels:
        """Set the mode of the models that are trained. The others are set to evaluation mode."""
        self.training = mode
        for name, model in self.items():
            model.train(mode and name in self._trained)
        return self


def joined(models: Mapping[str, Any], make: Callable[[Any], Any]) -> SeveralModels:
    """Return the `models` as one module. `make` returns the module for a value of `models`, a module or a factory.

    Raises ConfigError for a value that is not a torch module or is a Keras model, and for models that share a parameter.
    """
    made = {name: make(each) for name, each in models.items()}
    owners: dict[torch.nn.Parameter, str] = {}
    for name, model in made.items():
        refuse_keras(name, model)
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"models[{name!r}] is a {type(model).__name__}: pass a torch.nn.Module, or a factory of one"
            )
        if hasattr(SeveralModels({}), name):
            raise ConfigError(f"models: {name!r} is the name of a method of torch.nn.Module: choose another name")
        for parameter_name, parameter in model.named_parameters():
            other = owners.setdefault(parameter, name)
            if other != name:
                raise ConfigError(
                    f"the models {other!r} and {name!r} share the parameter {parameter_name}, so that two optimizers would change"
                    " it: make the shared part a model of its own"
                )
    return SeveralModels(made)
