"""Leave frozen parameters out of checkpoints if `checkpoint_trainable_only` is set, and compare their digests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from distributed.backends._torch import sharding
from distributed.backends._torch.tensor_io import dtype_of, raw_bytes
from distributed.backends._torch.tensors import MODEL, model_state
from distributed.checkpoints.durable import size_text
from distributed.checkpoints.shards import StoredTensor, read_tensors
from distributed.errors import CheckpointError, TrainingError

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend

Record = Mapping[str, Mapping[str, Any]]  # name -> element type, shape, size and digest of a parameter


class FrozenPart:
    """The parameters that were frozen when the model was prepared, with digests of their values at that time."""

    def __init__(self, model: torch.nn.Module, *, is_main: bool) -> None:
        """Read the values. Only the main process reads them. A collective if the model is sharded."""
        state = model_state(model)
        self.names = frozenset(name for name, tensor in state.items() if _is_frozen(tensor))
        self.num_all = sum(isinstance(tensor, torch.nn.Parameter) for tensor in state.values())
        self.record = record_of(model, self.names, is_main=is_main)  # empty on other ranks
        self._model, self._is_main = model, is_main

    def describe(self) -> str:
        """Return a line for the start of the run. Only the main process knows the size."""
        if not self.names:
            return "checkpoint_trainable_only: no parameter is frozen, so checkpoints have the whole model"
        size = size_text(sum(entry["bytes"] for entry in self.record.values()))
        return f"checkpoints leave out {len(self.names)} frozen parameters of {self.num_all} ({size})"

    def check_unchanged(self) -> None:
        """Raise TrainingError if one of the parameters is trained by now. Checkpoints would lack its values."""
        for name, tensor in model_state(self._model).items():
            if name in self.names and not _is_frozen(tensor):
                raise TrainingError(
                    f"checkpoint_trainable_only=True leaves out {name}, which was frozen at the start of the fit and is trained"
                    " now: set requires_grad=True before the fit, or drop checkpoint_trainable_only"
                )

    def check(self, stored: Record, directory: Path) -> None:
        """Raise CheckpointError if the frozen parameters are not those of the checkpoint `directory`.

        `stored` is the record of the checkpoint. It is empty if the checkpoint has all parameters. Not a collective: only the main
        process compares.
        """
        if not self._is_main:
            return
        if stored:
            check_same(self.record, stored, directory)
        else:
            self._check_whole(directory)

    def _check_whole(self, directory: Path) -> None:
        """Raise CheckpointError if a frozen parameter in a checkpoint with all parameters differs from that of the model.

        Later checkpoints leave the parameter out, so its stored value would be lost.
        """
        tensors, aliases = read_tensors(directory / MODEL)
        for name, here in self.record.items():
            there = tensors.get(aliases.get(name, name))
            if there is not None and (difference := _difference(here, _entry_of_stored(there))):
                raise CheckpointError(
                    f"checkpoint_trainable_only=True: the frozen parameter {name} has {difference} in the checkpoint"
                    f" {directory} than in the model: construct the model with the weights of the checkpoint, or drop the setting"
                )


def leave_out_frozen(backend: TorchBackend[Any], notice: Callable[[str], None]) -> FrozenPart | None:
    """Leave the parameters that are frozen now out of checkpoints, and return them.

    Return None if `checkpoint_trainable_only` is not set. Call it before the engine changes the model. A collective.
    """
    if not backend.config.checkpoint_trainable_only:
        return None
    found = FrozenPart(backend.plain, is_main=backend.context.is_main_process)
    backend.kind.left_out = found.names
    notice(found.describe())
    return found


def record_of(model: torch.nn.Module, names: Collection[str], *, is_main: bool = True) -> dict[str, dict[str, Any]]:
    """Return the record of the parameters in `names` that the model has, on the main process.

    Returns an empty dict on other ranks. A collective if the model is sharded.
    """
    record: dict[str, dict[str, Any]] = {}
    for name, tensor in model_state(model).items():
        if name in names:
            full = sharding.whole(tensor.detach())
            if is_main:
                record[name] = _entry(full.dtype, full.shape, raw_bytes(full))
    return record


def check_same(here: Record, stored: Record, directory: Path) -> None:
    """Raise CheckpointError that names the first frozen parameter that differs from the record of a checkpoint."""
    for name in [*stored, *(name for name in here if name not in stored)]:
        if name not in here:
            difference = "is frozen in the checkpoint, but not here"
        elif name not in stored:
            difference = "is frozen here, but not in the checkpoint"
        elif other := _difference(stored[name], here[name]):
            difference = f"has {other} here"
        else:
            continue
        raise CheckpointError(
            f"checkpoint {directory} has the trainable parameters only and belongs to other frozen ones: {name} {difference}:"
            " construct the model with the frozen weights with which it was trained (or give them as init_from), or start without it"
        )


def checked_names(model: torch.nn.Module, stored: Any, directory: Path) -> frozenset[str]:
    """Return the names that a checkpoint left out, after comparing them with the parameters of a whole `model`.

    `stored` is the record of the checkpoint, or None if the checkpoint has all parameters. Raises CheckpointError if they differ.
    """
    record = stored_record(stored, directory)
    check_same(record_of(model, record), record, directory)
    return frozenset(record)


def stored_record(content: Any, directory: Path) -> Record:
    """Return the record `content` of a checkpoint, or {} for None. Raises CheckpointError if `content` is not a record."""
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise CheckpointError(f"checkpoint {directory}: its record of the frozen parameters is damaged")
    return content


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def _entry(dtype: torch.dtype, shape: Any, content: memoryview) -> dict[str, Any]:
    digest = xxhash.xxh3_128_hexdigest(content)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "bytes": content.nbytes,
        "xxh3_128": digest,
    }


def _entry_of_stored(tensor: StoredTensor) -> dict[str, Any]:
    return _entry(dtype_of(tensor.dtype), tensor.shape, tensor.read())


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return a text that says how `other` differs from `one`, or "" if they are the same."""
    for key, what in {"shape": "the shape", "dtype": "the element type"}.items():
        if one.get(key) != other.get(key):
            return f"{what} {other.get(key)} instead of {one.get(key)}"
    return "" if one.get("xxh3_128") == other.get("xxh3_128") else "other values"
