"""Convert torch tensors to and from safetensors files, and small states to and from JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from distributed.checkpoints.jsonable import decode, encode
from distributed.checkpoints.tensor_file import RawTensor, check_header, write_tensors
from distributed.errors import CheckpointError, TrainingError

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_BY_WORD = {word: dtype for dtype, word in _DTYPES.items()}


def encode_state(value: Any, where: str, special: Callable[[Any], Any] | None) -> Any:
    """Return `value` as JSON, with tensors if `special` is `encode_tensor`.

    Raises CheckpointError that names a value that cannot be stored.
    """
    try:
        return encode(value, where, special)
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"{error}: keep a tensor or plain data there") from None


def encode_tensor(value: Any) -> dict[str, Any] | None:
    """Return a small tensor as JSON, bit for bit. Return None for anything else."""
    if not isinstance(value, torch.Tensor):
        return None
    raw = raw_bytes(value).tobytes().hex()
    return {"__tensor__": {"dtype": dtype_word("a stored value", value), "shape": list(value.shape), "bytes": raw}}


def decode_state(content: Any) -> Any:
    """Return the value that was given to `encode_state`. Raises CheckpointError if `content` is not its result."""
    try:
        return decode(content, _decode_special)
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's optimizer or schedule is not what was saved: {error!r}") from None


def _decode_special(kind: str, content: Any) -> torch.Tensor:
    if kind != "__tensor__":
        raise ValueError(f"unknown kind {kind!r}")
    dtype = _BY_WORD[content["dtype"]]
    raw = bytearray.fromhex(content["bytes"])
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(content["shape"]).clone()


def dtype_word(name: str, tensor: torch.Tensor) -> str:
    """Return safetensors' name of the element type. Raises TrainingError that names a tensor which no file can hold."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in _DTYPES:
        raise TrainingError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, which a checkpoint cannot hold"
        )
    return _DTYPES[tensor.dtype]


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's elements as bytes in row-major order.

    They are copied only if they are not on the CPU in this order already.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.numel() == 1:  # a tensor of one element is contiguous whatever its stride is, but `view` needs the stride 1
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8).numpy().data


def _reader(tensor: torch.Tensor) -> Callable[[], memoryview]:
    return lambda: raw_bytes(tensor)


def _copier(tensor: torch.Tensor, place: Callable[[torch.Tensor], None]) -> Callable[[memoryview], None]:
    def copy_to(memory: memoryview) -> None:
        kept = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
        kept.copy_(tensor.detach(), non_blocking=True)  # `write_file` waits for all copies together
        place(kept)

    return copy_to


def write_file(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Write a new safetensors file durably.

    Tensors may have any device and stride; one at a time is copied to the host. Return the places of the tensors in memory, if the file
    is kept there (`kept_in_memory`). A tensor without elements has none.
    """
    places: dict[str, torch.Tensor] = {}
    raw = [
        RawTensor(
            name,
            dtype_word(name, t),
            tuple(t.shape),
            _reader(t),
            _copier(t, functools.partial(places.__setitem__, name)),
        )
        for name, t in tensors.items()
    ]
    try:
        write_tensors(path, raw, metadata)
    finally:
        wait_for_copies(tensors.values())
    return places


def wait_for_copies(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until what was copied from the devices of `tensors` has arrived."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def dtype_of(word: str) -> torch.dtype:
    """Return the element type that safetensors calls `word`. Raises CheckpointError if torch does not have it."""
    if (dtype := _BY_WORD.get(word)) is None:
        raise CheckpointError(f"a tensor of the element type {word}, which torch does not have")
    return dtype


def tensor_of(word: str, shape: tuple[int, ...], data: memoryview) -> torch.Tensor:
    """Return a tensor that shares memory with `data`, bytes in row-major order."""
    dtype = dtype_of(word)
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if len(data) else torch.empty(shape, dtype=dtype)


def read_file(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return all tensors of a file, on the CPU, and its metadata.

    Raises CheckpointError if it is not a safetensors file.
    """
    try:
        check_header(path)
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
