"""Save and load the state of a torch optimizer and of its schedule.

Tensors are written to safetensors files under the names of their parameters. All other values are returned as JSON. Nothing is pickled.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from distributed.backends._torch import sharding
from distributed.backends._torch.begun_load import BegunLoad, complete
from distributed.backends._torch.tensor_io import decode_state, dtype_of, encode_state, encode_tensor
from distributed.backends._torch.tensors import ALONE, plain_name
from distributed.checkpoints.shards import StoredTensor, read_tensors
from distributed.errors import CheckpointError
from distributed.state import WorkerContext

OPTIMIZER = "optimizer"  # the directory in a checkpoint, and the prefix of its files

# These options choose how an update is computed and do not change its result. The current optimizer's values stay.
_OWN_OPTIONS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


class HoldsSlots(Protocol):
    """Protocol of an object that keeps stored tensors of an optimizer until it is known which part of them this rank needs."""

    def add(
        self, parameter: torch.Tensor, slot: str, stored: StoredTensor, dtype: torch.dtype
    ) -> list[Callable[[], None]]:
        """Keep a tensor of the shape of `parameter`, and return functions that read from its files. They may run in any thread."""


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
    complete(begin_load_optimizer(optimizer, parameters, directory, content))


def begin_load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Iterable[tuple[str, torch.Tensor]],
    directory: Path,
    content: Mapping[str, Any],
    held: HoldsSlots | None = None,
    context: WorkerContext = ALONE,
) -> BegunLoad:
    """Begin what `load_optimizer` does.

    Until `finish`, only the values of the tensors that are read change. The tensors of a parameter's shape are given to `held`, if there is
    one, and not to the optimizer. Raises the errors of `load_optimizer`.
    """
    _check_kinds(content)
    if content["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the optimizer is {type(optimizer).__name__}, the checkpoint holds {content['class']}:"
            f" use {content['class']} or start without the checkpoint"
        )
    names = _names(optimizer, parameters)
    _check_groups(optimizer, names, content["groups"])
    stored, _ = read_tensors(directory / OPTIMIZER, (context.rank, context.world_size))
    by_name = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    if (key := next((key for key in stored if _of_slot(key)[0] not in by_name), None)) is not None:
        raise CheckpointError(f"checkpoint from another model: its optimizer holds {key}")
    own_dtype = frozenset(content["own_dtype"])
    before = _slots(optimizer)
    targets, readers = dict[str, torch.Tensor](), dict[str, Callable[[], None]]()
    others: list[Callable[[], None]] = []
    for key, tensor in list(stored.items()):
        name, slot = _of_slot(key)
        parameter, _ = by_name[name]
        if slot != "step" and tensor.shape == parameter.shape:
            dtype = _slot_dtype(tensor, parameter, key in own_dtype)
            if held is not None:
                others += held.add(parameter, slot, stored.pop(key), dtype)
                continue
            targets[key] = _target(before.get((id(parameter), slot)), parameter, dtype)
            if (reader := sharding.reader(tensor, targets[key])) is not None:
                readers[key] = reader

    def give_up() -> None:
        optimizer.state.clear()  # some of its tensors have no values

    def finish() -> None:
        for group, saved in zip(optimizer.param_groups, content["groups"], strict=True):
            _restore_options(group, decode_state(saved["options"]))
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for slot, value in content["values"].get(names[id(parameter)], {}).items():
                    optimizer.state[parameter][slot] = decode_state(value)
        for key, tensor in stored.items():
            name, slot = _of_slot(key)
            parameter, group = by_name[name]
            if key not in targets:
                like = parameter if tensor.shape == parameter.shape else None
                dtype = _slot_dtype(tensor, parameter, key in own_dtype)
                value = _placed(sharding.read(tensor, like), parameter, group, slot, dtype)
                targets[key] = _filled(before.get((id(parameter), slot)), value)
            elif key not in readers:
                sharding.copy(tensor, targets[key])
            optimizer.state[parameter][slot] = targets[key]

    return BegunLoad(finish, [*readers.values(), *others], give_up)


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
        for option, value in decode_state(content["options"]).items():
            own = group.get(option)
            if not _is_alike(value, own) or (option == "lr" and value is None and own is not None):
                raise CheckpointError(
                    f"the checkpoint's state.json has {option}={value!r} in parameter group {i}, and the optimizer has {own!r}"
                )


def _is_alike(value: Any, own: Any) -> bool:
    """Return whether `value`, from a file, may take the place of the option `own`. None stands for a value of any kind."""
    if value is None or own is None:
        return True
    if isinstance(own, torch.Tensor):
        return isinstance(value, (int, float, torch.Tensor))
    if isinstance(own, bool) or isinstance(value, bool):
        return type(value) is type(own)
    if isinstance(own, (int, float)):
        return isinstance(value, (int, float, torch.Tensor))
    if isinstance(own, (list, tuple)):
        return isinstance(value, (list, tuple)) and len(value) == len(own) and all(map(_is_alike, value, own))
    return True


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


def _filled(own: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """Return the optimizer's `own` tensor with the elements of `value` if it has the same form, else `value`."""
    if own is None or type(own) is not torch.Tensor or type(value) is not torch.Tensor:
        return value
    is_like = (own.shape, own.dtype, own.device) == (value.shape, value.dtype, value.device)
    return own.copy_(value) if is_like and own.is_contiguous() and not own.requires_grad else value


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
        and sharding.are_cut_alike(own, parameter)
        and (own.stride(), own.dtype, own.device) == (parameter.stride(), dtype, parameter.device)
    )
