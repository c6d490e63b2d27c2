"""Convert plain Python values to JSON and back without loss, including tuples, counters, infinities and keys that are not strings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from distributed.config.reading import has_containers

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, where: str, special: Callable[[Any], Any] | None = None) -> Any:
    """Return `value` as strict JSON. A value that JSON lacks becomes an object with the single key `__kind__`.

    Args:
        value: the value to encode.
        where: the name of `value`, for error messages.
        special: encodes values that this function does not know, such as tensors; returns None for what it does not
            know.

    Raises:
        TypeError: a part of `value` cannot be stored. The message names it.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"__float__": repr(float(value))}
    if type(value) in (list, tuple):
        items = [encode(item, f"{where}[{i}]", special) for i, item in enumerate(value)]
        return items if type(value) is list else {"__tuple__": items}
    if isinstance(value, dict):
        return _encode_dict(value, where, special)
    known = special(value) if special is not None else None
    if known is not None:
        return known
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # a numpy scalar
        return encode(value.item(), where, special)
    raise TypeError(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold")


def decode(content: Any, special: Callable[[str, Any], Any] | None = None) -> Any:
    """Return the value that `encode` encoded.

    Raises ValueError for a kind that neither this function nor `special(kind, content)` knows.
    """
    if isinstance(content, list):
        return [decode(item, special) for item in content] if has_containers(content) else content
    if not isinstance(content, dict):
        return content
    kind = next(iter(content), "")
    if not kind.startswith("__"):
        if not has_containers(content.values()):
            return content
        return {key: decode(item, special) for key, item in content.items()}
    inner = content[kind]
    if kind == "__float__" and inner in _NOT_FINITE:
        return _NOT_FINITE[inner]
    if kind == "__tuple__":
        return tuple(decode(inner, special))
    if kind in ("__dict__", "__counter__"):
        pairs = {decode(key, special): decode(item, special) for key, item in inner}
        return pairs if kind == "__dict__" else Counter(pairs)
    if special is None:
        raise ValueError(f"unknown kind {kind!r}")
    return special(kind, inner)


def _encode_dict(value: dict[Any, Any], where: str, special: Callable[[Any], Any] | None) -> dict[str, Any]:
    is_counter = isinstance(value, Counter)
    if not is_counter and all(type(key) is str and not key.startswith("__") for key in value):
        return {key: encode(item, f"{where}.{key}", special) for key, item in value.items()}
    pairs = [
        [encode(key, f"{where} key", special), encode(item, f"{where}.{key}", special)] for key, item in value.items()
    ]
    return {"__counter__" if is_counter else "__dict__": pairs}
