"""Encode the values that ranks send to each other. No pickle is used, so reading a value runs no code, whoever sent it."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import struct
import sys
from collections.abc import Mapping
from typing import Any, cast

import numpy

from distributed.errors import ConfigError

_LENGTH = struct.Struct("<Q")
_PLAIN = (bool, int, str, type(None))


def to_bytes(value: Any) -> bytes:
    """Return `value` encoded as bytes: JSON that describes it, followed by the bytes of its arrays.

    Takes None, numbers, strings, bytes, NumPy arrays and torch tensors, and lists, tuples, mappings, named tuples and data
    classes of these at any depth. Raises ConfigError that names the type of anything else.
    """
    buffers: list[bytes] = []
    structure = json.dumps(_described(value, buffers), separators=(",", ":")).encode()
    header = json.dumps([len(structure), *map(len, buffers)]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, structure, *buffers])


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` encoded in `data`. Tensors are on the CPU and own their memory.

    Raises ConfigError if `data` was not written by `to_bytes`.
    """
    try:
        start = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        sizes = json.loads(data[_LENGTH.size : start])
        parts = []
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        return _restored(json.loads(parts[0]), parts[1:])
    except (
        ArithmeticError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
        AttributeError,
        struct.error,
    ) as error:
        raise ConfigError(
            f"a message from another rank cannot be read ({type(error).__name__}: {error}): another program may have connected"
            " to this run"
        ) from None


def _described(value: Any, buffers: list[bytes]) -> Any:
    """Return `value` in the form that JSON can hold. The bytes of arrays are appended to `buffers`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if kind in (bytes, bytearray):
        return ["bytes", _kept(bytes(value), buffers)]
    if kind in (list, tuple):
        return [kind.__name__, [_described(each, buffers) for each in value]]
    if kind is dict:
        return ["dict", _pairs(value, buffers)]
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return _described_array(value, buffers)
    if _is_tensor(value):
        return _described_tensor(value, buffers)
    return _described_container(value, buffers)


def _kept(data: bytes, buffers: list[bytes]) -> int:
    buffers.append(data)
    return len(buffers) - 1


def _pairs(value: Mapping[Any, Any], buffers: list[bytes]) -> list[Any]:
    return [[_described(key, buffers), _described(each, buffers)] for key, each in value.items()]


def _described_array(value: Any, buffers: list[bytes]) -> Any:
    if value.dtype.hasobject:
        return ["objects", list(value.shape), [_described(each, buffers) for each in value.ravel().tolist()]]
    if value.dtype.fields is not None:
        raise _not_sendable(value)
    name = "scalar" if isinstance(value, numpy.generic) else "array"
    # Types of other libraries, such as ml_dtypes' bfloat16, have no `dtype.str` that identifies them. Use `dtype.name`.
    kind = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
    return [name, kind, list(value.shape), _kept(value.tobytes(), buffers)]


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _described_tensor(value: Any, buffers: list[bytes]) -> Any:
    import torch

    if value.layout != torch.strided or value.is_quantized:
        raise _not_sendable(value)
    data = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), _kept(content, buffers)]


def _described_container(value: Any, buffers: list[bytes]) -> Any:
    """Describe a container of another class by the name of its class and its items."""
    kind = type(value)
    name = [kind.__module__, kind.__qualname__]
    if not _is_found(kind):
        raise _not_sendable(value)
    if isinstance(value, (list, tuple)):
        return ["items", *name, [_described(each, buffers) for each in value]]
    if isinstance(value, Mapping):
        return ["mapping", *name, _pairs(value, buffers)]
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["fields", *name, _pairs(fields, buffers)]
    raise _not_sendable(value)


def _not_sendable(value: Any) -> ConfigError:
    kind = type(value)
    return ConfigError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be sent to the other ranks: return tensors, arrays, numbers or"
        " strings, in lists, tuples, dicts or data classes"
    )


def _restored(content: Any, buffers: list[bytes]) -> Any:
    if not isinstance(content, list):
        return content
    kind, *rest = content
    return _READERS[kind](buffers, *rest)


def _restored_items(buffers: list[bytes], items: list[Any]) -> list[Any]:
    return [_restored(each, buffers) for each in items]


def _restored_dict(buffers: list[bytes], pairs: list[Any]) -> dict[Any, Any]:
    return {_restored(key, buffers): _restored(value, buffers) for key, value in pairs}


def _restored_array(buffers: list[bytes], dtype: str, shape: list[int], index: int) -> Any:
    return numpy.frombuffer(buffers[index], numpy.dtype(dtype)).reshape(shape).copy()


def _restored_objects(buffers: list[bytes], shape: list[int], items: list[Any]) -> Any:
    array = numpy.empty(len(items), object)
    for index, each in enumerate(items):
        array[index] = _restored(each, buffers)
    return array.reshape(shape)


def _restored_tensor(buffers: list[bytes], dtype: str, shape: list[int], index: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    # Accept only names that `str` returns for a type. Quantized types are refused, because their tensors have more
    # parts than their elements.
    if not isinstance(kind, torch.dtype) or str(kind) != f"torch.{dtype}" or dtype.startswith(("qint", "quint")):
        raise ValueError(f"{dtype} is not an element type")
    if not buffers[index]:
        return torch.empty(0, dtype=kind).reshape(shape)
    return torch.frombuffer(bytearray(buffers[index]), dtype=kind).reshape(shape)


def _restored_sequence(buffers: list[bytes], module: str, name: str, items: list[Any]) -> Any:
    kind, held = _class(module, name), _restored_items(buffers, items)
    if issubclass(kind, tuple):
        return tuple.__new__(kind, held)
    if not issubclass(kind, list):
        raise ValueError(f"{name} is not a sequence")
    made = list.__new__(kind)
    list.extend(made, held)
    return made


def _restored_mapping(buffers: list[bytes], module: str, name: str, pairs: list[Any]) -> Any:
    """Restore a mapping. A mapping that is neither a dict nor a UserDict becomes a dict."""
    kind, held = _class(module, name), _restored_dict(buffers, pairs)
    if issubclass(kind, collections.UserDict):
        made = object.__new__(kind)
        made.__dict__["data"] = held
        return made
    if not issubclass(kind, dict):
        return held
    base = collections.OrderedDict if issubclass(kind, collections.OrderedDict) else dict
    made = base.__new__(kind)
    for key, value in held.items():
        base.__setitem__(made, key, value)
    if dataclasses.is_dataclass(kind):  # outputs of Hugging Face models have each item as an attribute too
        for field in dataclasses.fields(kind):
            object.__setattr__(made, field.name, held.get(field.name))
    return made


def _restored_fields(buffers: list[bytes], module: str, name: str, pairs: list[Any]) -> Any:
    kind, held = _class(module, name), _restored_dict(buffers, pairs)
    if not dataclasses.is_dataclass(kind) or held.keys() != {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"{name} is not a data class with the fields {', '.join(held)}")
    made = cast(Any, object).__new__(kind)
    for key, value in held.items():
        object.__setattr__(made, key, value)
    return made


def _is_found(kind: type) -> bool:
    """Return whether other ranks can find the class `kind` by its name. They cannot if it was defined in a function."""
    try:
        return _class(kind.__module__, kind.__qualname__) is kind
    except (KeyError, ValueError):
        return False


def _class(module: str, name: str) -> Any:
    """Return the class `name` of `module`. The module must be loaded already, because a message must not cause an
    import."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = found.__dict__[part]
    if not isinstance(found, type):
        raise ValueError(f"{name} is not a class")
    return found


_READERS: Mapping[str, Any] = {
    "float": lambda buffers, text: float(text),
    "bytes": lambda buffers, index: buffers[index],
    "list": _restored_items,
    "tuple": lambda buffers, items: tuple(_restored_items(buffers, items)),
    "dict": _restored_dict,
    "array": _restored_array,
    "scalar": lambda buffers, *rest: _restored_array(buffers, *rest)[()],
    "objects": _restored_objects,
    "tensor": _restored_tensor,
    "items": _restored_sequence,
    "mapping": _restored_mapping,
    "fields": _restored_fields,
}
