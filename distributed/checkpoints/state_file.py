"""Read and write state.json of a checkpoint: the training state that all ranks share, and the backend's own state. No framework."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from distributed.checkpoints.arrays import Arrays, digest, reader
from distributed.checkpoints.durable import write_file
from distributed.checkpoints.jsonable import decode, encode
from distributed.checkpoints.manifest import STATE, NewerFormatError, parsed, read_small
from distributed.config.kinds import (
    COUNT,
    FLAG,
    NUMBER,
    OBJECT,
    SECONDS,
    TEXT,
    check_kinds,
    list_of,
    object_of,
    optional,
    pair_of,
)
from distributed.config.reading import MAX_JSON_BYTES, parse_json
from distributed.errors import CheckpointError, TrainingError
from distributed.state import DATA_VERSION, TrainState

_TENSORS = "state.safetensors"
_CLOCKS = {"train_time_s": 0.0, "total_time": 0.0}
_NUMBERS, _SUMS = object_of(NUMBER), object_of(pair_of(NUMBER))
_KINDS = {  # of the fields of TrainState
    "step": COUNT, "epoch": COUNT, "samples_in_epoch": COUNT, "samples_seen": COUNT, "cursor": optional(OBJECT),
    "data_version": COUNT,
    "stop_reason": optional(TEXT), "metrics": _NUMBERS, "best": _NUMBERS, "rows": list_of(_NUMBERS), "is_last_row_open": FLAG,
    "epoch_sums": _SUMS, "over_all": _NUMBERS, "log_sums": _SUMS, "train_time_s": SECONDS, "total_time": SECONDS,
    "fit_starts": list_of(pair_of(COUNT)), "callbacks": OBJECT,
}  # fmt: skip


def read_state(checkpoint: Path) -> tuple[TrainState, dict[str, Any]]:
    """Return (training state, dict that `Backend.save` returned) of a checkpoint.

    Raises CheckpointError if state.json is not a training state, or if a later version of this package wrote it.
    """
    content = parsed(checkpoint, STATE, read_small(checkpoint, STATE, MAX_JSON_BYTES))
    try:
        train = decode(content["train"], reader(checkpoint / _TENSORS))
        _check(train)
        check_kinds(content, {"backend": OBJECT})
        state, of_backend = from_json(train), content["backend"]
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError, OSError) as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        raise CheckpointError(f"checkpoint {checkpoint}: {STATE} is not a training state ({reason})") from None
    if state.data_version > DATA_VERSION:
        raise NewerFormatError(
            f"checkpoint {checkpoint} has version {state.data_version} of the order of samples, this version of the package"
            f" knows {DATA_VERSION}: upgrade"
        )
    return state, of_backend


def _check(train: Any) -> None:
    """Raise ValueError if `train` cannot be a training state."""
    check_kinds(train, _KINDS)
    if missing := [name for name in ("step", "epoch", "samples_in_epoch") if name not in train]:
        raise ValueError(f"has no {missing[0]}")
    if not all({"step", "epoch"} <= row.keys() for row in train.get("rows", ())):
        raise ValueError("has a row without its step and epoch")
    if train.get("samples_in_epoch", 0) > train.get("samples_seen", 0):
        raise ValueError(
            f"has samples_in_epoch={train['samples_in_epoch']}, more than samples_seen={train.get('samples_seen', 0)}"
        )


def to_json(state: TrainState) -> dict[str, Any]:
    """Return the fields of the state of training by name."""
    return dataclasses.asdict(state)


def from_json(content: dict[str, Any]) -> TrainState:
    """Return the state of training of which `to_json` returned `content`. Unknown names, written by a newer version, are ignored."""
    known = {field.name for field in dataclasses.fields(TrainState)}
    state = TrainState(**{name: value for name, value in content.items() if name in known})
    state.data_version = content.get("data_version", 1)  # the first version was not recorded
    if "is_last_row_open" not in content and state.rows:  # an older version had rows of epochs only
        state.is_last_row_open = state.rows[-1]["epoch"] > state.epoch
    return state


def write_state(checkpoint: Path, state: TrainState, extra: Any) -> None:
    """Write state.json, and the arrays and tensors of callbacks beside it. `read_state` reads both.

    Raises TrainingError with the value that JSON cannot hold, or OSError if the disk fails.
    """
    try:
        arrays = Arrays()
        content = {
            "train": encode(to_json(state), "train", arrays.encode),
            "backend": json.loads(json.dumps(extra)),
        }
        raw = json.dumps(content).encode()
        if len(raw) <= MAX_JSON_BYTES:
            parse_json(raw)  # raises an error if the file could not be read again
    except (TypeError, ValueError, RecursionError) as error:
        raise _unstorable(error) from None
    if len(raw) > MAX_JSON_BYTES:
        raise TrainingError(
            f"{STATE} would have {len(raw)} bytes, and {MAX_JSON_BYTES} are allowed: store less in callbacks"
        )
    write_file(checkpoint / STATE, [raw], len(raw))
    arrays.write(checkpoint / _TENSORS)


def identity(state: TrainState, best_value: float | None) -> str:
    """Return a string that is equal for two states if their checkpoints would differ only in times.

    Raises TrainingError like `write_state`.
    """
    content = {**to_json(state), **_CLOCKS, "best_value": best_value}
    try:
        return json.dumps(encode(content, "train", digest), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unstorable(error) from None


def _unstorable(error: Exception) -> TrainingError:
    return TrainingError(f"the state cannot be stored in {STATE}: {error}; keep plain values, arrays and tensors in it")
