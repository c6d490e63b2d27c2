"""Read and write state.json of a checkpoint: the training state that all ranks share, and the backend's own state. No framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distributed.checkpoints.arrays import Arrays, digest, reader
from distributed.checkpoints.durable import write_file
from distributed.checkpoints.jsonable import decode, encode
from distributed.checkpoints.manifest import STATE, NewerFormatError, parse_json, read_small
from distributed.errors import CheckpointError, TrainingError
from distributed.state import DATA_VERSION, TrainState

_MAX_BYTES = 32 << 20
_TENSORS = "state.safetensors"
_CLOCKS = {"train_time_s": 0.0, "total_time": 0.0}


def read_state(checkpoint: Path) -> tuple[TrainState, dict[str, Any]]:
    """Return (training state, what `Backend.save` returned) of a checkpoint.

    Raises CheckpointError if state.json is not a training state, or if a later version of this package wrote it.
    """
    content = parse_json(checkpoint, STATE, read_small(checkpoint, STATE, _MAX_BYTES))
    try:
        train = decode(content["train"], reader(checkpoint / _TENSORS))
        state, extra = TrainState.from_json(train), dict(content["backend"])
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError, OSError, StopIteration) as error:
        raise CheckpointError(f"checkpoint {checkpoint}: {STATE} is not a training state ({error!r})") from None
    if state.data_version > DATA_VERSION:
        raise NewerFormatError(
            f"checkpoint {checkpoint} has version {state.data_version} of the order of samples, this version of the package"
            f" knows {DATA_VERSION}: upgrade"
        )
    return state, extra


def write_state(checkpoint: Path, state: TrainState, extra: Any) -> None:
    """Write state.json, and the arrays and tensors of callbacks beside it. `read_state` reads both.

    Raises TrainingError with the value that JSON cannot hold, or OSError if the disk fails.
    """
    try:
        arrays = Arrays()
        content = {"train": encode(state.to_json(), "train", arrays.encode), "backend": json.loads(json.dumps(extra))}
    except (TypeError, ValueError, RecursionError) as error:
        raise _unstorable(error) from None
    raw = json.dumps(content, indent=1).encode()
    if len(raw) > _MAX_BYTES:
        raise TrainingError(
            f"{STATE} would have {len(raw)} bytes, and {_MAX_BYTES} are allowed: store less in callbacks"
        )
    write_file(checkpoint / STATE, [raw], len(raw))
    arrays.write(checkpoint / _TENSORS)


def identity(state: TrainState, best_value: float | None) -> str:
    """Return a string that is equal for two states if their checkpoints would differ only in times.

    Raises TrainingError like `write_state`.
    """
    content = {**state.to_json(), **_CLOCKS, "best_value": best_value}
    try:
        return json.dumps(encode(content, "train", digest), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unstorable(error) from None


def _unstorable(error: Exception) -> TrainingError:
    return TrainingError(f"the state cannot be stored in {STATE}: {error}; keep plain values, arrays and tensors in it")
