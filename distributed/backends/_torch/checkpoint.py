"""Write the state of a torch engine into a checkpoint and restore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch import modules, named_optimizers, tensors
from distributed.checkpoints.shards import weights_in

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend
    from distributed.config.settings import DistributedConfig


def save(backend: TorchBackend[Any], directory: Path) -> dict[str, Any]:
    """Write this rank's tensors into `directory` and return the rest of the state, as JSON. All ranks must call it."""
    update, passes, wholes = backend.update, backend.passes, backend.measured.wholes
    extra: dict[str, Any] = {"world_size": backend.world.world_size, "step": update.step}
    extra["loss_form"] = passes.objective.form if passes.is_settled else None
    extra["means"] = backend.measured.form
    extra["over_all"] = wholes.save(directory)
    with backend.averaged_weights.hidden():
        extra["model"] = backend.kind.save_model(directory)
    backend.averaged_weights.save(directory)
    extra["optimizer"] = backend.kind.save_optimizer(backend.optimizer, directory)
    extra |= update.schedule.state()
    extra["scaler"] = backend.precision.state()
    tensors.save_rng(directory, backend.world.rank, backend.device)
    return extra


def load(backend: TorchBackend[Any], directory: Path, state: Mapping[str, Any], notice: Callable[[str], None]) -> bool:
    """Restore what `save` wrote, at any world size. All ranks must call it.

    Returns whether the random generators were restored too. They are not if the world size differs.
    """
    update, passes = backend.update, backend.passes
    backend.kind.load_model(directory, state.get("model") or {})
    backend.averaged_weights.load(directory)
    options = named_optimizers.options_of(backend.optimizer)
    backend.kind.load_optimizer(backend.optimizer, directory, state["optimizer"])
    if named_optimizers.is_named(backend.optimizer):
        named_optimizers.set_options(backend.optimizer, options, notice)
    update.schedule.load(state, notice)
    backend.precision.load(state.get("scaler"))
    update.resume(int(state["step"]))
    backend.measured.form = state.get("means") or {}
    backend.measured.wholes.load(directory, state.get("over_all"))
    if form := state.get("loss_form"):  # choosing the form of the loss again on another batch could give another form
        passes.resume(form)
    is_same = int(state["world_size"]) == backend.world.world_size
    return is_same and tensors.load_rng(directory, backend.world.rank, backend.device)


def take_weights(model: Any, directory: Path, config: DistributedConfig) -> Any:
    """Return the user's `model` with the weights of a checkpoint. A factory is called on the CPU."""
    from distributed.backends._keras.models import is_model
    from distributed.backends._torch import keras_module

    made = modules.make_model(model, config, torch.device("cpu"))
    directory = weights_in(directory)
    if is_model(made):
        keras_module.take_weights(made, directory, config.dtype)
        return made
    built = modules.build_model(made, config, torch.device("cpu"))
    tensors.load_model(built, directory)
    return built
