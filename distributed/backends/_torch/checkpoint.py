"""Write the state of a torch engine into a checkpoint and restore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch import frozen, modules, named_optimizers, tensors
from distributed.backends._torch.begun_load import read
from distributed.backends.weights import load_weights
from distributed.checkpoints.shards import weights_in
from distributed.checkpoints.state_file import read_state
from distributed.errors import CheckpointError

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend
    from distributed.config.settings import DistributedConfig


def save(backend: TorchBackend[Any], directory: Path) -> dict[str, Any]:
    """Write this rank's tensors into `directory` and return the rest of the state, as JSON. All ranks must call it."""
    update, passes, wholes = backend.update, backend.passes, backend.measured.wholes
    extra: dict[str, Any] = {"world_size": backend.world.world_size, "step": update.step}
    is_known = passes.is_settled and backend.own_steps is None  # a loop of the script passes losses, not their form
    extra["loss_form"] = passes.objective.form if is_known else None
    extra["means"] = backend.measured.form
    extra["over_all"] = wholes.save(directory)
    if backend.frozen is not None and backend.frozen.names:
        backend.frozen.check_unchanged()
        extra["frozen"] = backend.frozen.record
    with backend.averaged_weights.hidden():
        extra["model"] = backend.kind.save_model(directory)
    backend.averaged_weights.save(directory)
    extra["optimizer"] = backend.kind.save_optimizer(backend.optimizer, directory)
    extra |= update.schedule.state()
    extra["scaler"] = backend.precision.state()
    tensors.save_rng(directory, backend.world.rank, backend.device)
    return extra


def begin_load(
    backend: TorchBackend[Any], directory: Path, state: Mapping[str, Any], notice: Callable[[str], None]
) -> Callable[[], bool]:
    """Begin to restore what `save` wrote, at any world size: read tensors into their places. All ranks must call it.

    Return a function that restores the rest. It returns whether the random generators were restored too. They are not if the world
    size differs.
    """
    left_out = _left_out(backend, directory, state.get("frozen"))
    model = backend.kind.begin_load_model(directory, left_out)
    optimizer = backend.kind.begin_load_optimizer(
        backend.optimizer, directory, state["optimizer"], backend.wrapper.hold()
    )
    read(model, optimizer)

    def finish() -> bool:
        model.finish()
        backend.averaged_weights.load(directory, left_out)
        options = named_optimizers.options_of(backend.optimizer)
        optimizer.finish()
        if named_optimizers.is_named(backend.optimizer):
            named_optimizers.set_options(backend.optimizer, options, notice)
        return _load_rest(backend, directory, state, notice)

    return finish


def _load_rest(
    backend: TorchBackend[Any], directory: Path, state: Mapping[str, Any], notice: Callable[[str], None]
) -> bool:
    """Restore everything but the model and the optimizer. Return whether the random generators were restored."""
    update, passes = backend.update, backend.passes
    update.schedule.load(state, notice)
    backend.precision.load(state.get("scaler"))
    update.resume(int(state["step"]))
    backend.measured.form = state.get("means") or {}
    backend.measured.wholes.load(directory, state.get("over_all"))
    if form := state.get("loss_form"):  # choosing the form of the loss again on another batch could give another form
        passes.resume(form)
    if int(state["world_size"]) != backend.world.world_size:
        return False
    return tensors.load_rng(directory, backend.world.rank, backend.device)


def _left_out(backend: TorchBackend[Any], directory: Path, content: Any) -> frozenset[str]:
    """Return the names of the parameters that the checkpoint lacks, after comparing them with those of the model.

    `content` is the record of these parameters in the state of the checkpoint, or None if the checkpoint has all parameters.
    Raises CheckpointError if the parameters differ.
    """
    record = frozen.stored_record(content, directory)
    if backend.frozen is not None:
        backend.frozen.check(record, directory)
    elif record:
        raise CheckpointError(
            f"checkpoint {directory} has the trainable parameters only: set checkpoint_trainable_only=True to resume from it"
        )
    return frozenset(record)


def take_weights(model: Any, directory: Path, config: DistributedConfig) -> Any:
    """Return the user's `model` with the weights of a checkpoint. A factory is called on the CPU."""
    from distributed.backends._torch import keras_module
    from distributed.backends.keras_kinds import is_model

    made = modules.make_model(model, config, torch.device("cpu"))
    checkpoint, directory = directory, weights_in(directory)
    if is_model(made):
        keras_module.take_weights(made, directory, config.dtype)
        return made
    built = modules.build_model(made, config, torch.device("cpu"))
    record = frozen.stored_record(read_state(checkpoint)[1].get("frozen"), checkpoint)
    if config.init_from is not None and frozen.record_of(built, record) != record:
        load_weights(built, config.init_from, strict=False)  # the workers loaded the frozen parameters from `init_from`
    left_out = frozen.checked_names(built, record, checkpoint)
    tensors.load_model(built, directory, left_out)
    return built
