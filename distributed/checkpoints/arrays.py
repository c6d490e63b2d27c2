"""Keep the NumPy arrays and torch tensors of a state in a safetensors file beside its JSON."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.checkpoints.tensor_file import WORDS, RawTensor, read_raw, write_tensors
from distributed.config.libraries import is_installed
from distributed.errors import CheckpointError

_TYPES = {word: name for name, word in WORDS.items()}
ARRAY, TENSOR = "__array__", "__tensor__"  # kinds of a value in the JSON


class Arrays:
    """Collect the arrays and tensors of a state. The JSON has their names in the file in place of them."""

    def __init__(self) -> None:
        self.found: list[RawTensor] = []

    def encode(self, value: Any) -> dict[str, Any] | None:
        """Return the JSON entry of an array or a tensor. Return None for other values, and for an unknown element type."""
        raw = _raw(str(len(self.found)), value)
        if raw is None:
            return None
        self.found.append(raw)
        return {TENSOR if _is_tensor(value) else ARRAY: raw.name}

    def write(self, path: Path) -> None:
        """Write the file, durably, unless there is nothing to write. Raises OSError if the disk fails."""
        if self.found:
            write_tensors(path, self.found, {})


def digest(value: Any) -> dict[str, Any] | None:
    """Return a value for JSON that is equal for equal arrays or tensors. Return None for anything else."""
    raw = _raw("", value)
    return None if raw is None else {ARRAY: [raw.dtype, list(raw.shape), hashlib.sha256(raw.read()).hexdigest()]}


def reader(path: Path) -> Callable[[str, Any], Any]:
    """Return a function (kind, name) that returns an array or a tensor of the file `path` that `Arrays` wrote.

    Each name may be read once, so that a small JSON file cannot ask for many copies of a large array. The function raises
    CheckpointError if the file is damaged, or if torch is not installed and the value is a torch tensor.
    """
    tensors: dict[str, RawTensor] | None = None

    def read(kind: str, name: Any) -> Any:
        nonlocal tensors
        if kind not in (ARRAY, TENSOR):
            raise ValueError(f"unknown kind {kind!r}")
        if tensors is None:
            tensors = {tensor.name: tensor for tensor in read_raw(path)[0]}
        raw = tensors.pop(name)
        return _tensor(raw, path) if kind == TENSOR else _array(raw)

    return read


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _raw(name: str, value: Any) -> RawTensor | None:
    import numpy

    if _is_tensor(value):
        import torch

        word = WORDS.get(str(value.dtype).removeprefix("torch."))
        if word is None or value.layout != torch.strided:
            return None
        flat = value.detach().cpu().contiguous().reshape(-1)
        return RawTensor(name, word, tuple(value.shape), lambda: flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, numpy.ndarray) and (word := WORDS.get(value.dtype.name)) is not None:
        return RawTensor(name, word, value.shape, lambda: numpy.ascontiguousarray(value).tobytes())
    return None


def _array(raw: RawTensor) -> Any:
    import numpy

    return numpy.frombuffer(raw.read(), _TYPES[raw.dtype]).reshape(raw.shape).copy()


def _tensor(raw: RawTensor, path: Path) -> Any:
    if not is_installed("torch"):
        raise CheckpointError(f"{path} has torch tensors of a callback: install torch, or drop the callback's state")
    import torch

    dtype = getattr(torch, _TYPES[raw.dtype])
    if 0 in raw.shape:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw.read()), dtype=dtype).reshape(raw.shape)
