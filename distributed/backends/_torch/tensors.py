"""Save and load the tensors of a torch model, in safetensors files under plain names. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.backends._torch import sharding
from distributed.backends._torch.begun_load import BegunLoad, complete
from distributed.backends._torch.generators import load_rng, save_rng
from distributed.backends._torch.tensor_io import (
    dtype_of,
    dtype_word,
    write_file,
)
from distributed.checkpoints.shards import StoredTensor, read_tensors
from distributed.checkpoints.weights import LoadedWeights, StoredWeights, check_loaded
from distributed.errors import CheckpointError, ConfigError, TrainingError
from distributed.state import WorkerContext

__all__ = [
    "load_model", "load_rng", "load_weights", "model_state", "named_parameters", "plain_name", "save_model", "save_rng", "unwrap",
]  # fmt: skip

MODEL = "model"  # the directory in a checkpoint, and the prefix of its files

ALONE = WorkerContext(0, 1, 0, 1, 0, "cpu")

# Parts that torch.compile and activation checkpointing insert into names.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module inside DistributedDataParallel, DataParallel and torch.compile wrappers.

    Wrappers are recognized by type, not by the prefix `module.`, because a user's submodule may have that name.
    """
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that torch.compile and activation checkpointing insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of a wrapped or bare model by their plain names. A tied parameter appears once."""
    return [(plain_name(name), parameter) for name, parameter in unwrap(model).named_parameters()]


def save_model(
    model: torch.nn.Module, directory: Path, context: WorkerContext = ALONE, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Write parameters and buffers, except those in `left_out`, to `model/*.safetensors`. All ranks must call it.

    A tensor with several names is stored once. The file's metadata holds the other names, which are also returned as
    `{"aliases": {name: stored name}}`. Raises TrainingError for an `extra_state` that is not a tensor, and OSError if
    the disk fails.
    """
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in model_state(model).items():
        if name in left_out:
            continue
        dtype_word(name, tensor)
        owner = first.setdefault(_storage_key(tensor), name)
        if owner != name:
            aliases[name] = owner
        else:
            kept[name] = tensor
    sharding.write(directory / MODEL, MODEL, kept, context, **({"aliases": json.dumps(aliases)} if aliases else {}))
    return {"aliases": aliases}


def save_weights(model: torch.nn.Module, path: Path, context: WorkerContext = ALONE) -> None:
    """Write the weights by name to one safetensors file, atomically. A tied tensor is written under each of its names.

    All ranks call it, and the main process writes.
    """
    staged = path.with_name(f".tmp-{path.name}")
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model_state(model).items():
        full = sharding.whole(tensor)
        if context.is_main_process:
            state[name] = full.cpu() if full is not tensor else tensor  # keeps one gathered tensor on the device
    if context.is_main_process:
        write_file(staged, state, {"format": "pt"})
        staged.replace(path)


def load_model(model: torch.nn.Module, directory: Path, left_out: Collection[str] = ()) -> None:
    """Copy the stored weights into the model's own tensors, in place. Not a collective.

    The parameters `left_out`, which the checkpoint lacks, keep their values.

    Raises CheckpointError with the first missing and unexpected parameters and different shapes, all in one line.
    """
    complete(begin_load_model(model, directory, left_out))


def begin_load_model(
    model: torch.nn.Module, directory: Path, left_out: Collection[str] = (), context: WorkerContext = ALONE
) -> BegunLoad:
    """Begin what `load_model` does, after a check of names and shapes. The model does not change yet."""
    stored, aliases = read_tensors(directory / MODEL, (context.rank, context.world_size))
    stored |= {name: stored[owner] for name, owner in aliases.items() if owner in stored}
    own = {name: tensor for name, tensor in model_state(model).items() if name not in left_out}
    _check_same_model(own, stored, directory)
    copy = _begin_copy(model, own, stored)

    def finish() -> None:
        _check_tied(own, stored)
        copy.finish()

    return copy._replace(finish=finish)


def load_weights(model: torch.nn.Module, weights: StoredWeights, *, strict: bool) -> LoadedWeights:
    """Copy stored weights into the model's own tensors, in place, and return what did not fit. Not a collective.

    Raises CheckpointError with the mismatches, before any tensor changes, if `strict` or if nothing fits.
    """
    own, stored = model_state(model), weights.tensors
    if (name := next((name for name, tensor in own.items() if tensor.is_meta), None)) is not None:
        raise ConfigError(f"{name} is on the meta device and has no values to load into: build the model on the CPU")
    others = {name: other for name in own if name in stored and (other := _other_form(own[name], stored[name]))}
    fitting = {name: tensor for name, tensor in stored.items() if name in own and name not in others}
    filled = {_storage_key(own[name]) for name in fitting}
    missing = [name for name, tensor in own.items() if name not in stored and _storage_key(tensor) not in filled]
    unexpected = [name for name in stored if name not in own]
    loaded = LoadedWeights(
        weights.source, len(fitting), tuple(missing), tuple(unexpected), others, weights.is_trainable_only
    )
    check_loaded(loaded, strict=strict)
    own = {name: own[name] for name in fitting}
    _check_tied(own, fitting)
    complete(_begin_copy(model, own, fitting))
    return loaded


def _begin_copy(
    model: torch.nn.Module, own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]
) -> BegunLoad:
    """Return the load whose reads fill the tensors that need no more than a copy, and which then copies all others."""
    plain = _filled_by_a_copy(unwrap(model))
    readers = {
        name: reader
        for name, tensor in stored.items()
        if id(own[name]) in plain and (reader := sharding.reader(tensor, own[name])) is not None
    }

    def copy_others() -> None:
        others = {}
        for name, tensor in stored.items():
            if id(own[name]) not in plain:
                others[name] = sharding.read(tensor, own[name])
            elif name not in readers:
                sharding.copy(tensor, own[name])
        if others:  # the caller has compared the names
            bare = unwrap(model)
            keys = {plain_name(key): key for key in bare.state_dict(keep_vars=True)}
            bare.load_state_dict({keys[name]: value for name, value in others.items()}, strict=False)

    return BegunLoad(copy_others, [*readers.values()])


def _filled_by_a_copy(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers into which `load_state_dict` does nothing but copy.

    A module or a hook of the script may change the values before it copies them, so there are none if the model has one.
    """
    modules = list(model.modules())
    is_torchs = getattr(model.load_state_dict, "__func__", None) is torch.nn.Module.load_state_dict
    if not is_torchs or not all(map(_loads_as_torch_does, modules)):
        return set()
    return {id(tensor) for each in modules for tensor in (*each._parameters.values(), *each._buffers.values())}


def _loads_as_torch_does(module: torch.nn.Module) -> bool:
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    return _are_torchs(module._load_from_state_dict, *(hook for each in hooks for hook in each.values()))


def saves_its_parameters(model: torch.nn.Module) -> bool:
    """Return whether `state_dict` returns the parameters themselves, and nothing that code of the script makes from them."""
    bare = unwrap(model)
    is_torchs = getattr(bare.state_dict, "__func__", None) is torch.nn.Module.state_dict
    return is_torchs and all(map(_saves_as_torch_does, bare.modules()))


def _saves_as_torch_does(module: torch.nn.Module) -> bool:
    hooks = (module._state_dict_hooks, module._state_dict_pre_hooks)
    functions = (hook for each in hooks for hook in each.values())
    return _are_torchs(module._save_to_state_dict, module.get_extra_state, *functions)


def _are_torchs(*functions: Any) -> bool:
    return all(str(getattr(each, "__module__", "")).startswith("torch.") for each in functions)


def _other_form(own: torch.Tensor, stored: StoredTensor) -> tuple[Any, Any] | None:
    """Return (stored, own) if the shapes differ, or if the element types differ and are not both floating, else None.

    The entries of the pair are shapes or element types.
    """
    if own.shape != stored.shape:
        return list(stored.shape), list(own.shape)
    there = dtype_of(stored.dtype)
    if own.dtype == there or (own.is_floating_point() and there.is_floating_point):
        return None
    return str(there), str(own.dtype)


def model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's `state_dict` by plain names, with the model's own tensors.

    A tied tensor appears under each name.
    """
    state: dict[str, torch.Tensor] = {}
    for key, value in unwrap(model).state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise TrainingError(
                f"{key} is a {type(value).__name__}, but a checkpoint holds tensors only:"
                f" return a tensor from get_extra_state, or keep the value in a callback's state"
            )
        name = plain_name(key)
        if name in state:
            raise TrainingError(f"two entries of the model are called {name} without their wrappers: rename one")
        state[name] = value
    return state


def _storage_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of one tensor. Empty tensors are never tied."""
    if tensor.numel() == 0 or sharding.is_in_pieces(tensor):
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return (tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _check_same_model(own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor], directory: Path) -> None:
    both = [name for name in own if name in stored]
    shapes = [name for name in both if own[name].shape != stored[name].shape]
    kinds = [(name, own[name].dtype, dtype_of(stored[name].dtype)) for name in both]
    found = {
        "missing keys": [name for name in own if name not in stored],
        "unexpected keys": [name for name in stored if name not in own],
        "other shapes:": [
            f"{name} is {list(stored[name].shape)} in the checkpoint, {list(own[name].shape)} here" for name in shapes
        ],
        "other types:": [
            f"{name} is {there} in the checkpoint, {here} here"
            for name, here, there in kinds
            if here != there and not (here.is_floating_point and there.is_floating_point)
        ],
    }
    if parts := [f"{what} {_first(names)}" for what, names in found.items() if names]:
        raise CheckpointError(
            f"checkpoint {directory} is of another model: {'; '.join(parts)}: build the model as it was saved,"
            " or start without the checkpoint"
        )


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _check_tied(own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Raise CheckpointError if one tensor of the model is stored as two different tensors in the checkpoint.

    Without the check, the tensor that is copied last would silently replace the other.
    """
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in own.items():
        owner = first.setdefault(_storage_key(tensor), name)
        one, other = stored[owner], stored[name]
        if one is not other and (one.dtype != other.dtype or one.read() != other.read()):
            raise CheckpointError(
                f"checkpoint from another model: {owner} and {name} are one tensor here, two in the checkpoint"
            )
