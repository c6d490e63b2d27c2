"""What a torch backend writes into a checkpoint and reads back: model, optimizer, schedule and generators.

Tensors go to safetensors files under plain names, everything else is returned as JSON. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from distributed.errors import CheckpointError, TrainingError
from distributed.jsonable import decode, encode
from distributed.tensor_file import RawTensor, check_header, write_tensors

MODEL_FILE = "model/model.safetensors"
OPTIMIZER_FILE = "optimizer/optimizer.safetensors"

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # torch.compile, activation checkpointing
# How a machine computes the update, not what the update is: these stay as the present optimizer has them.
_OWN_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip


def unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DistributedDataParallel, DataParallel and torch.compile wrappers.

    By type and not by the prefix `module.`: a user's own submodule may have that name.
    """
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        elif (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def plain_name(name: str) -> str:
    """A parameter's name without the parts that torch.compile and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters of a wrapped or bare model by their plain names; a tied one once."""
    return [(plain_name(name), parameter) for name, parameter in unwrap(model).named_parameters()]


def save_model(model: torch.nn.Module, directory: Path) -> dict[str, Any]:
    """Write parameters and buffers to `model/model.safetensors`. One rank only.

    A tensor with several names is stored once; the file's metadata holds the other names, which are also returned
    as `{"aliases": {name: stored name}}`. Raises TrainingError
    for an `extra_state` that is not a tensor, OSError as the disk gives it.
    """
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in _model_state(model).items():
        owner = first.setdefault(_place(tensor), name)
        if owner != name:
            aliases[name] = owner
        else:
            kept[name] = tensor
    _write(directory / MODEL_FILE, kept, {"aliases": json.dumps(aliases)} if aliases else {})
    return {"aliases": aliases}


def load_model(model: torch.nn.Module, directory: Path) -> None:
    """Copy the stored weights into the model's own tensors, in place. Every rank for itself.

    CheckpointError names the first missing and unexpected parameter, or a shape or kind that differs.
    """
    stored, metadata = _read(directory / MODEL_FILE)
    for name, owner in _aliases(metadata, directory).items():
        if owner in stored:
            stored[name] = stored[owner]
    own = _model_state(model)
    _check_same_names(own, stored, directory)
    for name, tensor in own.items():
        _check_fits(name, tensor, stored[name])
    _check_tied(own, stored)
    keys = {plain_name(key): key for key in unwrap(model).state_dict(keep_vars=True)}
    unwrap(model).load_state_dict({keys[name]: tensor for name, tensor in stored.items()})


def save_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]], directory: Path
) -> dict[str, Any]:
    """Write the optimizer's tensors as `state.<parameter>.<slot>`; return the rest as JSON. One rank only.

    `parameters` are the model's by plain names (`named_parameters`); others are called `extra.<i>`.
    CheckpointError names a slot that is neither a tensor nor plain data.
    """
    names = _names(optimizer, parameters)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    own_dtype: list[str] = []  # slots whose element type is not their parameter's, and must not follow it
    for parameter, slots in optimizer.state.items():
        name = names[id(parameter)]
        for slot, value in slots.items():
            key = _slot_key(name, slot)
            if isinstance(value, torch.Tensor):
                tensors[key] = value
                if value.is_floating_point() and value.dtype != parameter.dtype and slot != "step":
                    own_dtype.append(key)
            else:
                values.setdefault(name, {})[slot] = _encode(value, key)
    _write(directory / OPTIMIZER_FILE, tensors, {})
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
    """Take up what `save_optimizer` wrote (`content` is what it returned): the next update is bit for bit the same.

    How updates are computed (foreach, fused, capturable) stays as it is here. Every rank for itself.
    CheckpointError where the optimizer, its groups or a shape differ.
    """
    if content["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}, the checkpoint holds {content['class']}:"
            f" use {content['class']} or start without the checkpoint"
        )
    names = _names(optimizer, parameters)
    _check_groups(optimizer, names, content["groups"])
    for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
        _restore_options(group, _decode(saved["options"]))
    stored, _ = _read(directory / OPTIMIZER_FILE)
    own_dtype = frozenset(content["own_dtype"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for slot, value in content["values"].get(name, {}).items():
                optimizer.state[parameter][slot] = _decode(value)
    by_name = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    for key, tensor in stored.items():
        name, _, slot = key.removeprefix("state.").rpartition(".")
        if name not in by_name:
            raise CheckpointError(f"checkpoint from another model: its optimizer holds {key}")
        parameter, group = by_name[name]
        optimizer.state[parameter][slot] = _placed(tensor, parameter, group, slot, key in own_dtype)


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """A schedule's `state_dict` as JSON, exact. Functions in it are left out: the script builds them again.

    CheckpointError names an entry that is not plain data.
    """
    content: dict[str, Any] = _encode(_without_functions(scheduler.state_dict()), type(scheduler).__name__)
    return content


def load_scheduler_state(scheduler: Any, content: Mapping[str, Any]) -> None:
    """Put the result of `scheduler_state` back."""
    scheduler.load_state_dict(_decode(dict(content)))


def save_rng(directory: Path, rank: int) -> None:
    """Write this rank's generator states (torch, its CUDA device, numpy's global one, python's) as arrays."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        states |= _numpy_state(sys.modules["numpy"])
    _write(_rng_file(directory, rank), states, {"python.version": str(version)})


def load_rng(directory: Path, rank: int) -> bool:
    """Put this rank's generator states back, bit for bit. False where none were saved for it (another world size)."""
    path = _rng_file(directory, rank)
    if not path.exists():
        return False
    states, metadata = _read(path)
    try:
        torch.set_rng_state(states["torch"])
        gauss = states["python.gauss"].tolist()
        words = tuple(states["python.words"].tolist())
        random.setstate((int(metadata["python.version"]), words, gauss[0] if gauss else None))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        if "numpy.key" in states:
            _set_numpy_state(states)
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} does not hold generator states: {error}") from None
    return True


def _rng_file(directory: Path, rank: int) -> Path:
    return directory / "rng" / f"rank-{rank}.safetensors"


def _numpy_state(numpy: types.ModuleType) -> dict[str, torch.Tensor]:
    kind, key, position, has_gauss, gauss = numpy.random.get_state()
    if kind != "MT19937":
        raise TrainingError(f"numpy's global generator is {kind}, only the default MT19937 can be stored")
    return {
        "numpy.key": torch.from_numpy(key.copy()),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([gauss], dtype=torch.float64),
    }


def _set_numpy_state(states: Mapping[str, torch.Tensor]) -> None:
    import numpy

    position, has_gauss = states["numpy.position"].tolist()
    key, gauss = states["numpy.key"].numpy(), states["numpy.gauss"].item()
    numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))


def _model_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's `state_dict` by plain names; its tensors are the model's own. Tied tensors appear under each name."""
    state: dict[str, torch.Tensor] = {}
    for key, value in unwrap(model).state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise TrainingError(
                f"{key} is a {type(value).__name__}, and a checkpoint holds tensors only:"
                f" return a tensor from get_extra_state, or keep the value in a callback's state"
            )
        name = plain_name(key)
        if name in state:
            raise TrainingError(f"two entries of the model are called {name} without their wrappers: rename one")
        state[name] = value
    return state


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor. Empty tensors have no place and are never tied."""
    if tensor.numel() == 0:
        return (id(tensor),)
    storage = tensor.untyped_storage().data_ptr()
    return (tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _check_same_names(own: Mapping[str, Any], stored: Mapping[str, Any], directory: Path) -> None:
    missing = [name for name in own if name not in stored]
    unexpected = [name for name in stored if name not in own]
    if missing or unexpected:
        parts = [f"it lacks {missing[0]} (and {len(missing) - 1} more)"] if missing else []
        parts += [f"this model lacks its {unexpected[0]} (and {len(unexpected) - 1} more)"] if unexpected else []
        raise CheckpointError(f"checkpoint from another model: {directory}: {'; '.join(parts)}")


def _check_fits(name: str, own: torch.Tensor, stored: torch.Tensor) -> None:
    if own.shape != stored.shape:
        raise CheckpointError(
            f"checkpoint from another model: {name} has shape {list(stored.shape)} there, {list(own.shape)} here"
        )
    if own.dtype != stored.dtype and not (own.is_floating_point() and stored.is_floating_point()):
        raise CheckpointError(f"checkpoint from another model: {name} is {stored.dtype} there, {own.dtype} here")


def _check_tied(own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> None:
    """One tensor here must not be two different ones there: the last copied would win silently."""
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in own.items():
        owner = first.setdefault(_place(tensor), name)
        if stored[owner] is not stored[name] and not torch.equal(stored[owner], stored[name]):
            raise CheckpointError(f"checkpoint from another model: {owner} and {name} are one tensor here, two there")


def _aliases(metadata: Mapping[str, str], directory: Path) -> dict[str, str]:
    try:
        return {str(name): str(owner) for name, owner in json.loads(metadata.get("aliases", "{}")).items()}
    except (ValueError, AttributeError, RecursionError):
        raise CheckpointError(f"{directory / MODEL_FILE}: its table of tied names is damaged") from None


def _names(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """The name of each of the optimizer's parameters, by id."""
    names = {id(parameter): plain_name(name) for name, parameter in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    return names | {id(parameter): f"extra.{i}" for i, parameter in enumerate(others)}


def _slot_key(name: str, slot: Any) -> str:
    if not isinstance(slot, str) or "." in slot:
        raise CheckpointError(f"optimizer state of {name} has the slot {slot!r}: it must be a word without dots")
    return f"state.{name}.{slot}"


def _group_content(group: Mapping[str, Any], names: Mapping[int, str], index: int) -> dict[str, Any]:
    options = {key: value for key, value in group.items() if key not in _OWN_OPTIONS}
    return {
        "params": [names[id(parameter)] for parameter in group["params"]],
        "options": _encode(_without_functions(options), f"optimizer group {index}"),
    }


def _check_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: list[Mapping[str, Any]]) -> None:
    if len(optimizer.param_groups) != len(saved):
        raise CheckpointError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint {len(saved)}"
        )
    for i, (group, content) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        here, there = {names[id(parameter)] for parameter in group["params"]}, set(content["params"])
        if here != there:
            name = min(here ^ there)
            place = "here but not in the checkpoint" if name in here else "in the checkpoint but not here"
            raise CheckpointError(f"optimizer group {i} holds {name} {place}: group the parameters alike")


def _restore_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor):
            own.copy_(torch.as_tensor(value))  # a compiled update holds on to this very tensor
        else:
            group[key] = value


def _placed(
    tensor: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any], slot: str, keep_dtype: bool
) -> torch.Tensor:
    """A slot's tensor where torch's own `Optimizer.load_state_dict` would have it, without its loss of precision."""
    if slot == "step":
        on_device = group.get("capturable") or group.get("fused")
        return tensor.to(parameter.device if on_device else tensor.device, copy=True)
    follows = tensor.is_floating_point() and parameter.is_floating_point() and not keep_dtype
    dtype = parameter.dtype if follows else tensor.dtype
    if tensor.shape == parameter.shape:  # with the parameter's strides, which fused and foreach updates like
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(tensor)
    return tensor.to(device=parameter.device, dtype=dtype, copy=True)


def _without_functions(state: Any) -> Any:
    if type(state) is dict:
        kept = {key: value for key, value in state.items() if not isinstance(value, types.FunctionType)}
        return {key: _without_functions(value) for key, value in kept.items()}
    return [_without_functions(item) for item in state] if type(state) is list else state


def _encode(value: Any, where: str) -> Any:
    try:
        return encode(value, where, _encode_tensor)
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot be stored: {error}; tensors and plain data can") from None


def _encode_tensor(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, torch.Tensor):
        return None
    raw = _raw(value).tobytes().hex()
    return {"__tensor__": {"dtype": _dtype_word("a stored value", value), "shape": list(value.shape), "bytes": raw}}


def _decode(content: Any) -> Any:
    try:
        return decode(content, _decode_special)
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's optimizer or schedule is not what was saved: {error!r}") from None


def _decode_special(kind: str, content: Any) -> torch.Tensor:
    if kind != "__tensor__":
        raise ValueError(f"unknown kind {kind!r}")
    dtype = next(dtype for dtype, word in _DTYPES.items() if word == content["dtype"])
    raw = bytearray.fromhex(content["bytes"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(content["shape"]).clone()


def _dtype_word(name: str, tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _DTYPES:
        raise TrainingError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which a checkpoint cannot hold"
        )
    return _DTYPES[tensor.dtype]


def _raw(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements, row-major, as bytes; a copy only where it is not so on the CPU already."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _reader(tensor: torch.Tensor) -> Callable[[], memoryview]:
    return lambda: _raw(tensor)


def _write(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = [RawTensor(name, _dtype_word(name, t), tuple(t.shape), _reader(t)) for name, t in tensors.items()]
    write_tensors(path, raw, metadata)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of a file, on the CPU, with its metadata. CheckpointError where it is not a safetensors file."""
    try:
        check_header(path)
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
