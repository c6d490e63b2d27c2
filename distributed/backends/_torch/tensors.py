"""Save and load model, optimizer, schedule and generators of a torch backend.

Tensors are written to safetensors files under plain names. All other values are returned as JSON. Nothing is pickled.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed.backends._torch import sharding
from distributed.backends._torch.generators import load_rng, save_rng
from distributed.backends._torch.tensor_io import (
    decode_state,
    dtype_of,
    dtype_word,
    encode_state,
    encode_tensor,
    write_file,
)
from distributed.checkpoints.reading import run_in_threads
from distributed.checkpoints.shards import StoredTensor, read_tensors
from distributed.checkpoints.weights import LoadedWeights, StoredWeights, check_loaded
from distributed.errors import CheckpointError, ConfigError, TrainingError
from distributed.state import WorkerContext

__all__ = [
    "load_model", "load_optimizer", "load_rng", "load_scheduler_state", "load_weights", "model_state", "named_parameters", "plain_name",
    "save_model", "save_optimizer", "save_rng", "scheduler_state", "unwrap",
]  # fmt: skip

MODEL, OPTIMIZER = "model", "optimizer"  # directories of a checkpoint, and prefixes of their files

ALONE = WorkerContext(0, 1, 0, 1, 0, "cpu")

# Parts that torch.compile and activation checkpointing insert into names.
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
# These options choose how an update is computed and do not change its result. The current optimizer's values stay.
_OWN_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


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
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_file(staged, state, {"format": "pt"})
        staged.replace(path)


def load_model(model: torch.nn.Module, directory: Path, left_out: Collection[str] = ()) -> None:
    """Copy the stored weights into the model's own tensors, in place. Not a collective.

    The parameters `left_out`, which the checkpoint lacks, keep their values.

    Raises CheckpointError with the first missing and unexpected parameters and different shapes, all in one line.
    """
    stored, aliases = read_tensors(directory / MODEL)
    stored |= {name: stored[owner] for name, owner in aliases.items() if owner in stored}
    own = {name: tensor for name, tensor in model_state(model).items() if name not in left_out}
    _check_same_model(own, stored, directory)
    _check_tied(own, stored)
    _copy(model, own, stored)


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
    _check_tied({name: own[name] for name in fitting}, fitting)
    _copy(model, own, fitting)
    return loaded


def _copy(model: torch.nn.Module, own: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    bare = unwrap(model)
    keys = {plain_name(key): key for key in bare.state_dict(keep_vars=True)}
    plain = _filled_by_a_copy(bare)
    readers = {
        name: sharding.reader(tensor, own[name]) if id(own[name]) in plain else None for name, tensor in stored.items()
    }
    run_in_threads([reader for reader in readers.values() if reader is not None])
    values = {
        keys[name]: sharding.read(tensor, own[name]) if readers[name] is None else own[name]
        for name, tensor in stored.items()
    }
    bare.load_state_dict(values, strict=False)  # the caller has compared the names


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
    functions = (module._load_from_state_dict, *module._load_state_dict_pre_hooks.values())
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


def save_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    context: WorkerContext = ALONE,
) -> dict[str, Any]:
    """Write the optimizer's tensors as `state.<parameter>.<slot>` and return the rest as JSON. All ranks must call it.

    `parameters` are the model's, by plain names (`named_parameters`). Other parameters are named `extra.<i>`. Raises
    CheckpointError that names a slot which is neither a tensor nor plain data.
    """
    names = _names(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    own_dtype: list[str] = []  # slots whose element type is not that of their parameter and must not follow it
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        for slot, value in slots.items():
            key = _slot_key(name, slot)
            if isinstance(value, torch.Tensor):
                tensors[key] = value.to_dense() if value.is_sparse else value  # such as a sparse gradient's momentum
                if value.is_floating_point() and value.dtype != parameter.dtype and slot != "step":
                    own_dtype.append(key)
            else:
                values.setdefault(name, {})[slot] = encode_state(value, key, special=None)
    sharding.write(directory / OPTIMIZER, OPTIMIZER, tensors, context)
    return {
        "class": type(optimizer).__name__,
        "groups": [_group_content(group, names, i) for i, group in enumerate(optimizer.param_groups)],
        "values": values,
        "own_dtype": own_dtype,
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    content: Mapping[str, Any],
) -> None:
    """Restore what `save_optimizer` wrote, so that the next update is bit for bit the same. Not a collective.

    `content` is what `save_optimizer` returned. Options that select how updates are computed (foreach, fused,
    capturable) do not change. Tensors that the optimizer has already are filled in place: new memory would cost more time than
    reading. Raises CheckpointError if the optimizer, its parameter groups or a shape differ.
    """
    _check_kinds(content)
    if content["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}, the checkpoint holds {content['class']}:"
            f" use {content['class']} or start without the checkpoint"
        )
    names = _names(optimizer, parameters)
    _check_groups(optimizer, names, content["groups"])
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        _restore_options(group, decode_state(saved["options"]))
    stored, _ = read_tensors(directory / OPTIMIZER)
    by_name = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    if (key := next((key for key in stored if _of_slot(key)[0] not in by_name), None)) is not None:
        raise CheckpointError(f"checkpoint from another model: its optimizer holds {key}")
    own_dtype = frozenset(content["own_dtype"])
    readers: list[Callable[[], None]] = []
    before = _slots(optimizer)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot, value in content["values"].get(name, {}).items():
                optimizer.state[parameter][slot] = decode_state(value)
    for key, tensor in stored.items():
        name, slot = _of_slot(key)
        parameter, group = by_name[name]
        own = before.get((id(parameter), slot))
        dtype = _slot_dtype(tensor, parameter, key in own_dtype)
        like = parameter if tensor.shape == parameter.shape else None
        target = None if slot == "step" or like is None else _target(own, parameter, dtype)
        reader = None if target is None else sharding.reader(tensor, target)
        if reader is not None:
            readers.append(reader)
        else:
            value = sharding.read(tensor, like)
            target = _placed(value, parameter, group, slot, dtype) if target is None else target.copy_(value)
        optimizer.state[parameter][slot] = target
    try:
        run_in_threads(readers)
    except CheckpointError:
        optimizer.state.clear()  # some of its tensors have no values
        raise


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a schedule's `state_dict` as exact JSON.

    Functions in it are left out, because the script creates them again.

    Raises CheckpointError that names an entry which is not plain data.
    """
    content: dict[str, Any] = encode_state(
        _without_functions(scheduler.state_dict()), type(scheduler).__name__, encode_tensor
    )
    return content


def load_scheduler_state(scheduler: Any, content: Mapping[str, Any]) -> None:
    """Restore the result of `scheduler_state`."""
    scheduler.load_state_dict(decode_state(dict(content)))


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
    if tensor.numel() == 0 or sharding.is_sharded(tensor):
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


def _names(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Return the name of each of the optimizer's parameters, by id."""
    names = {id(parameter): plain_name(name) for name, parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    return names | {id(parameter): f"extra.{i}" for i, parameter in enumerate(others)}


def _check_kinds(content: Mapping[str, Any]) -> None:
    """Raise CheckpointError if `content`, which comes from a file, was not written by `save_optimizer`."""
    groups = content.get("groups")
    is_whole = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    for name, kind in {"class": str, "values": dict, "own_dtype": list}.items():
        is_whole = is_whole and isinstance(content.get(name), kind)
    is_whole = is_whole and all(
        isinstance(group.get("params"), list) and isinstance(group.get("options"), dict) for group in groups or ()
    )
    if not is_whole:
        raise CheckpointError("the checkpoint's state.json does not hold an optimizer")


def _slot_key(name: str, slot: Any) -> str:
    if not isinstance(slot, str) or "." in slot:
        raise CheckpointError(f"optimizer state of {name} has the slot {slot!r}: it must be a word without dots")
    return f"state.{name}.{slot}"


def _of_slot(key: str) -> tuple[str, str]:
    """Return the name of the parameter and the slot of a stored tensor."""
    name, _, slot = key.removeprefix("state.").rpartition(".")
    return name, slot


def _group_content(group: Mapping[str, Any], names: Mapping[int, str], index: int) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _OWN_OPTIONS}
    return {
        "params": [names[id(parameter)] for parameter in group["params"]],
        "options": encode_state(_without_functions(options), f"parameter group {index}", encode_tensor),
    }


def _check_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: list[Mapping[str, Any]]) -> None:
    if len(optimizer.param_groups) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, but the checkpoint has {len(saved)}"
        )
    for i, (group, content) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        here, there = {names[id(parameter)] for parameter in group["params"]}, set(content["params"])
        if here != there:
            name = min(here ^ there)
            where = "here but not in the checkpoint" if name in here else "in the checkpoint but not here"
            raise CheckpointError(
                f"parameter group {i} holds {name} {where}: group the parameters as in the checkpoint"
            )


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor):
            own.copy_(torch.as_tensor(value))  # copy in place, because a compiled update refers to this tensor
        else:
            group[key] = value


def _slot_dtype(stored: StoredTensor, parameter: torch.Tensor, keep_dtype: bool) -> torch.dtype:
    """Return the element type that torch's `Optimizer.load_state_dict` would give a slot, but without losing precision."""
    dtype = dtype_of(stored.dtype)
    follows = dtype.is_floating_point and parameter.is_floating_point() and not keep_dtype
    return parameter.dtype if follows else dtype


def _target(own: torch.Tensor | None, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor for a slot of the parameter's shape: the optimizer's `own` if it has the form of a new one."""
    if own is not None and _is_like(own, parameter, dtype):
        return own
    # with the parameter's strides, as fused and foreach updates prefer
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _placed(
    tensor: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any], slot: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor of the slot `step`, or of one that has another shape than the parameter, where torch's
    `Optimizer.load_state_dict` would place it."""
    if slot == "step":
        on_device = group.get("capturable") or group.get("fused")
        return tensor.to(parameter.device if on_device else tensor.device, copy=True)
    return tensor.to(device=parameter.device, dtype=dtype, copy=True)


def _without_functions(state: Any) -> Any:
    if type(state) is dict:
        kept = {key: value for key, value in state.items() if not isinstance(value, types.FunctionType)}
        return {key: _without_functions(value) for key, value in kept.items()}
    return [_without_functions(item) for item in state] if type(state) is list else state


def _slots(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Return the tensors of the optimizer by (id of the parameter, slot), without those that share memory with another."""
    slots = {
        (id(parameter), slot): value
        for parameter, values in optimizer.state.items()
        if isinstance(values, Mapping)
        for slot, value in values.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    users = Counter(sharding.local(tensor).data_ptr() for tensor in [*slots.values(), *parameters])
    return {key: value for key, value in slots.items() if users[sharding.local(value).data_ptr()] == 1}


def _is_like(own: torch.Tensor, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether `own` is what `torch.empty_like(parameter, dtype=dtype)` would return."""
    return (
        not own.requires_grad
        and sharding.is_sharded(own) == sharding.is_sharded(parameter)
        and sharding.box(own) == sharding.box(parameter)
        and (own.stride(), own.dtype, own.device) == (parameter.stride(), dtype, parameter.device)
    )
