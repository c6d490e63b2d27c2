"""Take nested containers of tensors apart, rebuild them and move them to a device."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def children(value: Any) -> dict[Any, Any] | None:
    """Return the entries of a tuple, list, mapping or data class by index, key or field.

    Return None for anything else.
    """
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuilt(value: Any, held: dict[Any, Any]) -> Any:
    """Return a container like `value` that holds `held`.

    A mapping that is neither a dict nor a UserDict becomes a dict.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*held.values())
    if isinstance(value, (tuple, list)):
        return type(value)(held.values())
    if type(value) is dict or (isinstance(value, Mapping) and not isinstance(value, (dict, collections.UserDict))):
        return held
    like = copy.copy(value)
    for name, child in held.items():
        if isinstance(value, Mapping):  # a Hugging Face BatchEncoding or model output
            like[name] = child
        else:
            object.__setattr__(like, name, child)  # works for frozen data classes too
    return like


def move(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return `batch` on `device`, with floating tensors in `dtype` if given. Tensors inside containers are moved too.

    An object with its own `.to` is moved by that method. Anything else is returned unchanged.
    """
    if isinstance(batch, torch.Tensor):
        later = device.type != "cpu"  # a non-blocking copy to the CPU could be read before it is complete
        if dtype is not None and batch.is_floating_point():
            return batch.to(device=device, dtype=dtype, non_blocking=later)
        return batch.to(device, non_blocking=later)
    if type(batch) in (list, tuple):
        return type(batch)([move(item, device, dtype) for item in batch])
    is_dict = isinstance(batch, (dict, collections.UserDict))
    if not is_dict and callable(getattr(batch, "to", None)):  # for example a PackedSequence or a graph
        return batch.to(device)
    held = children(batch)
    return batch if held is None else rebuilt(batch, {key: move(child, device, dtype) for key, child in held.items()})


def rows_not_finite(batch: Any, num_samples: int) -> list[int]:
    """Return the rows of a batch in which any tensor has a value that is NaN or infinite.

    Sparse, nested and 8-bit tensors are not looked at, and neither are sequences of `num_samples` steps, whose second dimension may be
    that of the samples.
    """
    found: set[int] = set()
    for tensor in _tensors(batch):
        is_plain = tensor.layout == torch.strided and not tensor.is_nested and tensor.element_size() > 1
        is_first = (
            tensor.dim() > 0
            and len(tensor) == num_samples
            and not (tensor.dim() > 2 and tensor.shape[1] == num_samples)
        )
        if is_plain and is_first and tensor.is_floating_point() and tensor.numel():
            is_bad = ~torch.isfinite(tensor.detach()).reshape(num_samples, -1).all(1)
            found.update(is_bad.nonzero().flatten().tolist())
    return sorted(found)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for child in (children(value) or {}).values():
        yield from _tensors(child)
