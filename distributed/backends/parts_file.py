"""Write the state of metrics over all samples into a checkpoint: tensors in one safetensors file, with JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from distributed.backends.parts import Arguments, RankedPart, mapped
from distributed.checkpoints.jsonable import decode, encode
from distributed.checkpoints.tensor_file import RawTensor, read_raw, write_tensors
from distributed.config.reading import parse_json
from distributed.errors import CheckpointError, TrainingError

FILE = Path("metrics") / "train.safetensors"
Content = Mapping[str, tuple[Sequence[Any], Sequence[RankedPart]]]  # name -> (state of each rank, pieces)


class Tensors(Protocol):
    """Convert the tensors of an engine for the file."""

    def to_raw(self, name: str, leaf: Any) -> RawTensor | None:
        """Return a tensor on the host as raw bytes, or None if it is not a tensor."""

    def from_raw(self, word: str, shape: tuple[int, ...], data: Any) -> Any:
        """Return the tensor that `to_raw` was given."""


def write_metrics(directory: Path, content: Content, engine: Tensors) -> None:
    """Write `content` into the file below `directory`. Write nothing if there is no content.

    Raises:
        TrainingError: if the file cannot hold a value, which the error names.
    """
    tensors: list[RawTensor] = []

    def leaf(value: Any) -> Any:
        raw = engine.to_raw(str(len(tensors)), value)
        if raw is None:
            return None
        tensors.append(raw)
        return {"__leaf__": raw.name}

    encoded = {}
    for name, (states, pieces) in content.items():
        if any(state is not None for state in states) or pieces:
            whole = {"states": list(states), "pieces": [_plain(piece) for piece in pieces]}
            try:
                encoded[name] = encode(whole, f"metric {name!r}", leaf)
            except (TypeError, RecursionError) as error:
                fix = "pass over_all(..., transform=...) that keeps tensors, numbers and words"
                raise TrainingError(f"{error}: {fix}") from None
    if encoded:
        write_tensors(directory / FILE, tensors, {"metrics": json.dumps(encoded)})


def _plain(piece: RankedPart) -> list[Any]:
    is_call = isinstance(piece.value, Arguments)
    value = [piece.value.args, piece.value.named] if is_call else piece.value
    return [list(piece.key), piece.rank, piece.num_samples, is_call, value]


def read_metrics(directory: Path, engine: Tensors) -> dict[str, tuple[list[Any], list[RankedPart]]]:
    """Return what `write_metrics` wrote below `directory`, or an empty dict if there is no file.

    Raises:
        CheckpointError: if `write_metrics` did not write the file.
    """
    path = directory / FILE
    if not path.is_file():
        return {}
    tensors, metadata = read_raw(path)
    read: dict[str, Callable[[], Any]] = {
        tensor.name: lambda tensor=tensor: engine.from_raw(tensor.dtype, tensor.shape, tensor.read())  # type: ignore[misc]
        for tensor in tensors
    }

    def leaf(kind: str, name: Any) -> Any:
        if kind != "__leaf__":
            raise ValueError(f"unknown kind {kind!r}")
        return read[name]()

    try:
        content = decode(parse_json(metadata["metrics"]), leaf)
        return {
            name: (list(each["states"]), [_piece(piece) for piece in each["pieces"]]) for name, each in content.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not hold metrics: {error!r}") from None


def _piece(content: Any) -> RankedPart:
    key, rank, num_samples, is_call, value = content
    if is_call:
        value = Arguments(tuple(value[0]), dict(value[1]))
    return RankedPart((int(key[0]), int(key[1])), int(rank), int(num_samples), mapped(value, lambda leaf: leaf))
