"""Write the outputs of `predict` into files of each rank, and read them back in the order of the samples."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed.backends.base import Backend
from distributed.backends.parts import Fields, has_rows, mapped, num_bytes
from distributed.backends.world import World
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.arrays import Arrays, reader
from distributed.checkpoints.durable import replace_file
from distributed.checkpoints.jsonable import decode, encode
from distributed.checkpoints.manifest import read_small
from distributed.checkpoints.tensor_file import read_raw, write_tensors
from distributed.config.addresses import refuse_address
from distributed.config.kinds import COUNT, FLAG, check_kinds, list_of
from distributed.config.reading import MAX_JSON_BYTES, parse_json
from distributed.errors import CheckpointError, ConfigError, DistributedError
from distributed.state import WorkerContext

MANIFEST = "predictions.json"
_FORMAT = 1
_MAX_BYTES, _MAX_SAMPLES = 64 << 20, 1 << 14  # of a file
_AGREE_EVERY = 64  # update batches between two checks for a failed write on another rank
_KINDS = {"format": COUNT, "files": list_of(COUNT), "samples": list_of(COUNT), "is_by_rank": FLAG}
_NOT_STORED = "predict(out=...) stores rows of tensors and arrays, or values of JSON, for each sample"


@dataclasses.dataclass(frozen=True)
class _Piece:
    indices: Any  # of its samples, an array [samples]
    value: Any


class PredictionWriter:
    """Write the outputs of this rank into a directory. All ranks call every method, and each is a collective."""

    def __init__(
        self, path: str | os.PathLike[str], context: WorkerContext, agreement: Agreement, *, force: bool
    ) -> None:
        """Make the directory. Raises ConfigError if it exists, unless `force` is set or an earlier `predict` left it unfinished."""
        if not isinstance(path, (str, os.PathLike)):
            raise ConfigError(f"predict(out={path!r}): name a directory, as a str or a Path")
        refuse_address(path, "predict(out=...)")
        self._path, self._context, self._agreement = Path(path), context, agreement
        agreement.on_main(lambda: _make(self._path, force=force))
        self._pieces: list[_Piece] = []
        self._waiting = self._num_bytes = self._num_files = self._num_samples = self._num_batches = 0
        self._error: OSError | DistributedError | None = None

    def add(self, outputs: Any, indices: Any) -> None:
        """Add the outputs of the samples `indices`, an array [samples], which is empty if this rank had none in this batch."""
        if self._error is None:
            try:
                self._add(outputs, indices)
            except (OSError, DistributedError) as error:  # the other ranks go on to the next agreement
                self._error = error
        if self._num_batches % _AGREE_EVERY == 0:
            self._agreement.on_all(self._raise)
        self._num_batches += 1

    def finish(self, world: World, *, is_by_rank: bool) -> Path:
        """Write the remaining outputs, then the manifest, which marks the directory as complete. Return the directory.

        `is_by_rank` says that indices count the samples of each rank from 0.
        """
        self._agreement.on_all(self._flush_rest)
        found = world.gather([self._num_files, self._num_samples])
        content = {
            "format": _FORMAT, "files": [each[0] for each in found], "samples": [each[1] for each in found], "is_by_rank": is_by_rank,
        }  # fmt: skip
        self._agreement.on_main(lambda: _complete(self._path, content))
        return self._path

    def _add(self, outputs: Any, indices: Any) -> None:
        if not len(indices):
            return
        value = mapped(outputs, lambda leaf: leaf)
        _check(value, len(indices), "outputs")
        self._pieces.append(_Piece(indices, value))
        self._waiting += len(indices)
        self._num_bytes += num_bytes(value)
        if self._num_bytes >= _MAX_BYTES or self._waiting >= _MAX_SAMPLES:
            self._flush()

    def _flush(self) -> None:
        if not self._pieces:
            return
        _write(self._path / _name(self._context.rank, self._num_files), self._pieces)
        self._num_files += 1
        self._num_samples += self._waiting
        self._pieces, self._waiting, self._num_bytes = [], 0, 0

    def _flush_rest(self) -> None:
        self._raise()
        self._flush()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def write_outputs(
    path: str | os.PathLike[str],
    outputs: Iterator[tuple[int, Any, int]],
    backend: Backend[Any],
    *,
    timeout_s: float,
    is_by_rank: bool,
    force: bool,
) -> Path:
    """Write what `outputs` yields into a directory, and return the directory. A collective.

    Args:
        path: the directory.
        outputs: yields (position of the first sample over all ranks, result of `predict_step`, number of samples of this rank).
        backend: the backend, after `setup`.
        timeout_s: how long a rank waits for the others.
        is_by_rank: whether each rank has samples of its own, which come rank by rank.
        force: whether to replace outputs in `path`.
    """
    import numpy

    world, rank, used = backend.world, backend.world.rank, 0
    writer = PredictionWriter(path, world.context, Agreement(world, timeout_s), force=force)
    for position, value, count in outputs:
        first, step = (used, 1) if is_by_rank else (position + rank, world.world_size)
        indices = numpy.arange(first, first + count * step, step, dtype=numpy.int64)
        used += count
        writer.add(backend.join_outputs([[(0, rank, value)]]) if count else None, indices)
    return writer.finish(world, is_by_rank=is_by_rank)


def load_predictions(path: str | os.PathLike[str]) -> Any:
    """Return the outputs that `Trainer.predict(data, out=path)` has written, in the order of the samples.

    This function needs no process group and runs no code from the files.

    Args:
        path: the directory.

    Returns:
        The outputs as `predict(data)` returns them. Data classes and other mappings become dicts whose entries are also attributes.

    Raises:
        CheckpointError: the directory is not complete, or a file is missing or damaged.
    """
    import numpy

    directory = Path(path)
    content = _manifest(directory)
    starts = [sum(content["samples"][:rank]) if content["is_by_rank"] else 0 for rank in range(len(content["samples"]))]
    pieces = [
        _Piece(piece.indices + starts[rank], piece.value)
        for rank, count in enumerate(content["files"])
        for piece in (_read(directory / _name(rank, number)) for number in range(count))
    ]
    if not pieces:
        return []
    order = numpy.concatenate([piece.indices for piece in pieces])
    if not numpy.array_equal(numpy.sort(order), numpy.arange(sum(content["samples"]))):
        raise CheckpointError(f"{directory} does not hold each sample once: run predict again")
    return _joined([(piece.value, len(piece.indices)) for piece in pieces], numpy.argsort(order))


def _name(rank: int, number: int) -> str:
    return f"rank-{rank:05}-{number:06}.safetensors"


def _make(path: Path, *, force: bool) -> None:
    """Make an empty directory `path`."""
    if path.is_dir() and not path.is_symlink():
        rest = [each.name for each in path.iterdir()]
        is_ours = all(name == MANIFEST or name.startswith(("rank-", ".tmp-")) for name in rest)
        if not is_ours:
            raise ConfigError(f"{path} has other files than predict(out=...) writes: name another directory")
        if MANIFEST in rest and not force:
            raise ConfigError(f"{path} already exists: name another path, or replace it with force=True")
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        raise ConfigError(f"{path} already exists and is not a directory: name another path")
    path.mkdir(parents=True)


def _complete(path: Path, content: dict[str, Any]) -> None:
    names = (_name(rank, number) for rank, count in enumerate(content["files"]) for number in range(count))
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{path} lacks the file {missing[0]} that another process wrote: name a directory that all nodes share"
        )
    raw = json.dumps(content).encode()
    replace_file(path / MANIFEST, [raw], len(raw))


def _check(value: Any, num_samples: int, name: str) -> None:
    """Raise ConfigError if a part of `value` has no row for each sample, or cannot be stored."""
    if hasattr(value, "detach") and str(value.layout) != "torch.strided":
        raise ConfigError(f"{name} is a tensor of the layout {value.layout}: return its to_dense()")
    if value is None or (has_rows(value, num_samples) and not isinstance(value, (dict, list, tuple))):
        return
    if isinstance(value, list) and len(value) == num_samples:
        return
    for key, child in _children(value):
        _check(child, num_samples, f"{name}.{key}" if isinstance(value, dict) else f"{name}[{key}]")
    if not isinstance(value, (dict, list, tuple)):
        raise ConfigError(
            f"{name} is a {type(value).__name__} without a row for each of {num_samples} samples: {_NOT_STORED}"
        )


def _children(value: Any) -> Sequence[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _write(path: Path, pieces: Sequence[_Piece]) -> None:
    import numpy

    indices = numpy.concatenate([piece.indices for piece in pieces]).astype(numpy.int64)
    value = _joined([(piece.value, len(piece.indices)) for piece in pieces], None)
    arrays = Arrays()
    encoded = arrays.encode(indices)
    try:
        content = {"indices": encoded, "outputs": encode(value, "outputs", arrays.encode)}
    except (TypeError, RecursionError) as error:
        what = str(error).replace(", which a checkpoint cannot hold", "")
        raise ConfigError(f"{what}: {_NOT_STORED}") from None
    write_tensors(path, arrays.found, {"predictions": json.dumps(content)}, replace_file)


def _read(path: Path) -> _Piece:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: copy the whole directory, or run predict again")
    _, metadata = read_raw(path)
    try:
        content = decode(parse_json(metadata["predictions"]), reader(path))
        indices, value = content["indices"], mapped(content["outputs"], lambda leaf: leaf)
        if indices.ndim != 1 or indices.dtype != "int64":
            raise ValueError("its indices are not a list of numbers")
        _check(value, len(indices), "outputs")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ConfigError) as error:
        raise CheckpointError(f"{path} does not hold predictions: {error!r}") from None
    return _Piece(indices, value)


def _manifest(directory: Path) -> dict[str, Any]:
    if not (directory / MANIFEST).is_file():
        raise CheckpointError(
            f"{directory} has no {MANIFEST}: it is not a directory of predict(out=...), or predict has not finished"
        )
    try:
        content: dict[str, Any] = parse_json(read_small(directory, MANIFEST, MAX_JSON_BYTES))
        check_kinds(content, _KINDS)
        if content["format"] != _FORMAT:
            raise ValueError(f"has format {content['format']}, and this version of the package knows {_FORMAT}")
        if len(content["files"]) != len(content["samples"]):
            raise ValueError(f"has {len(content['files'])} files, and numbers of samples of {len(content['samples'])}")
        return {name: content[name] for name in _KINDS}
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{directory / MANIFEST} is not a manifest of predictions: {error}") from None


def _joined(pieces: Sequence[tuple[Any, int]], order: Any) -> Any:
    """Return the (value, samples) of `pieces` as one value. Its samples are taken in the `order`, or one after the other if it is None.

    Rows of one shape become one tensor or array. Any other value of a sample becomes an entry of a list.
    """
    values = [value for value, _ in pieces]
    first = values[0]
    if all(value is None for value in values):
        return None
    if all(type(value) is type(first) and _shape(value, n) == _shape(first, pieces[0][1]) for value, n in pieces) and (
        _shape(first, pieces[0][1]) is not None
    ):
        return _rows_in_order(pieces, order)
    if all(_shape(value, n) is not None or (isinstance(value, list) and len(value) == n) for value, n in pieces):
        samples = [sample for value, n in pieces for sample in _samples(value, n)]
        return samples if order is None else [samples[i] for i in order.tolist()]
    keys = [[key for key, _ in _children(value)] for value in values]
    if first is None or any(each != keys[0] for each in keys):
        raise ConfigError(f"the outputs of two batches have different structures: {_NOT_STORED}")
    joined = {key: _joined([(value[key], n) for value, n in pieces], order) for key in keys[0]}
    return Fields(joined) if isinstance(first, dict) else type(first)(joined.values())


def _shape(value: Any, num_samples: int) -> tuple[Any, ...] | None:
    """Return (rows of a sample, the other dimensions, element type) of a tensor or an array, or None for another value."""
    if not getattr(value, "shape", ()):
        return None
    return value.shape[0] // num_samples, tuple(value.shape[1:]), value.dtype


def _rows_in_order(pieces: Sequence[tuple[Any, int]], order: Any) -> Any:
    values = [value for value, _ in pieces]
    rows = _concatenated(values)
    if order is None:
        return rows
    count = sum(n for _, n in pieces)
    samples = rows.reshape(count, len(rows) // count, *rows.shape[1:])
    return samples[order].reshape(rows.shape)


def _concatenated(values: Sequence[Any]) -> Any:
    if hasattr(values[0], "detach"):  # tensors of torch
        import torch

        return torch.cat(list(values))
    import numpy

    return numpy.concatenate(values)


def _samples(value: Any, num_samples: int) -> Iterator[Any]:
    """Yield the value of each sample. A sample of one row has no dimension of rows."""
    if isinstance(value, list):
        yield from value
        return
    rows = value.shape[0] // num_samples
    for i in range(num_samples):
        yield value[i] if rows == 1 else value[i * rows : (i + 1) * rows]
