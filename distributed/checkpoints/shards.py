"""Read tensors of a checkpoint that may be split into pieces over several files, whole or in part.

A piece is an ordinary tensor of a safetensors file. The file's metadata has, under `DCP_SHARDING_INFO`, the index in
the whole tensor at which each piece begins. This is the layout of torch.distributed.checkpoint
(`HuggingFaceStorageWriter(save_distributed=True)`), so torch and this module can read each other's files. The metadata of a file
of pieces has the element types and shapes of all whole tensors too, so that a rank needs no other file to load its own pieces. No
framework is needed, and only the requested bytes are read.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distributed.checkpoints.tensor_file import ITEM_BYTES, RawTensor, copy_all, read_raw
from distributed.config.kinds import COUNT, check_kinds
from distributed.config.reading import parse_json
from distributed.errors import CheckpointError

OFFSETS = "DCP_SHARDING_INFO"
_WHOLES = "whole_tensors"
AVERAGED = "averaged"  # directory of a checkpoint for averaged weights, with the files of a model

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (index of the first element, shape)


class StoredTensor(NamedTuple):
    """One named tensor of a checkpoint. `pieces` are pairs (start index, tensor of the piece).

    They cover it exactly, unless `others` returns all tensors of the checkpoint with all their pieces. Its files are then read when
    another piece is needed.
    """

    name: str
    dtype: str  # as safetensors names it: "F32", "BF16", ...
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], RawTensor], ...]
    # Whether the elements of `pieces`, one piece after the other, are those of the tensor, row-major.
    is_in_order: bool = False
    others: Callable[[], Mapping[str, StoredTensor]] | None = None

    def in_full(self) -> StoredTensor:
        """Return this tensor with all its pieces. Raises CheckpointError if they are not those of such a tensor."""
        if self.others is None:
            return self
        found = self.others().get(self.name)
        if found is None or (found.dtype, found.shape) != (self.dtype, self.shape):
            raise CheckpointError(
                f"the pieces of {self.name} do not form one tensor of {self.dtype} and shape {list(self.shape)}"
            )
        return found

    def read(self, box: Box | None = None) -> memoryview:
        """Return the bytes of the part `box` (default: of the whole tensor), row-major.

        A part that is exactly one piece is not copied.
        """
        start, shape = box or ((0,) * len(self.shape), self.shape)
        if (exact := self._piece(start, shape)) is not None:
            return memoryview(exact.read())
        if 0 in shape:
            return memoryview(b"")
        import numpy

        item = ITEM_BYTES[self.dtype]
        out = numpy.empty((*shape, item), numpy.uint8)
        for begins, raw in self.in_full().pieces:
            common = _overlap((start, shape), (begins, raw.shape))
            if common is not None:
                piece = numpy.frombuffer(raw.read(), numpy.uint8).reshape((*raw.shape, item))
                out[_slices(common, start)] = piece[_slices(common, begins)]
        return out.reshape(-1).data

    def reader(self, box: Box) -> Callable[[memoryview], None] | None:
        """Return a function that reads the part `box` from its files into memory of its size.

        Return None if the part is not one piece, unless it is the whole tensor and its pieces follow each other in row-major order.
        """
        if (piece := self._piece(*box)) is not None:
            return functools.partial(copy_all, [piece])
        if self.others is not None and 0 not in box[1]:
            return self.in_full().reader(box)
        if self.is_in_order and box[1] == self.shape:
            return functools.partial(copy_all, [raw for _, raw in self.pieces])
        return None

    def _piece(self, start: tuple[int, ...], shape: tuple[int, ...]) -> RawTensor | None:
        return next((raw for begins, raw in self.pieces if begins == start and raw.shape == shape), None)


def name_of_pieces(stem: str, rank: int, world_size: int) -> str:
    """Return the name of the file with the pieces of `rank`."""
    return f"{stem}-{rank + 1:05d}-of-{world_size:05d}.safetensors"


def name_of_whole(stem: str) -> str:
    """Return the name of the file with the tensors that are not in pieces, beside files of pieces."""
    return f"{stem}-whole.safetensors"


def sharding_metadata(
    starts: Mapping[str, Sequence[int]], wholes: Mapping[str, tuple[str, Sequence[int]]] | None = None
) -> dict[str, str]:
    """Return the metadata of a file of pieces.

    Args:
        starts: name -> the index in the whole tensor at which the piece begins.
        wholes: name -> (element type, shape) of each tensor of which some rank has pieces. Only for a file that has all pieces of its
            rank.
    """
    offsets = {name: {"saved_offsets": list(start)} for name, start in sorted(starts.items())}
    metadata = {OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
    if wholes is not None:
        metadata[_WHOLES] = json.dumps({name: [dtype, *shape] for name, (dtype, shape) in sorted(wholes.items())})
    return metadata


def read_tensors(directory: Path, own: tuple[int, int] | None = None) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return (tensors by name, aliases) of the safetensors files in `directory`.

    Aliases map other names of tied tensors to stored names. Raises CheckpointError with the file that is damaged, or
    the tensor whose pieces do not fit together.

    Args:
        directory: the directory. Its name is the first part of the names of its files.
        own: (rank, number of ranks) of this process. If as many ranks have saved the checkpoint, the files with the pieces of other
            ranks are read only if their pieces are needed.
    """
    files = sorted(directory.glob("*.safetensors"))
    if own is not None and (file := directory / name_of_pieces(directory.name, *own)) in files:
        pieces, metadata = read_raw(file)
        if _WHOLES in metadata:
            whole_file = directory / name_of_whole(directory.name)
            tensors, aliases = read_files([whole_file] if whole_file in files else [], directory)
            others = functools.cache(lambda: read_files(files, directory)[0])
            return tensors | _own_pieces(pieces, metadata, file, others), aliases | _aliases(metadata, file)
    return read_files(files, directory)


def read_files(files: Iterable[Path], where: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return (tensors by name, aliases) of safetensors files, as `read_tensors` does. Errors about pieces name `where`."""
    pieces: dict[str, list[tuple[tuple[int, ...], RawTensor]]] = {}
    aliases: dict[str, str] = {}
    for file in files:
        tensors, metadata = read_raw(file)
        starts = _table(metadata, OFFSETS, file)
        aliases |= _aliases(metadata, file)
        for raw in tensors:
            start = _start(starts[raw.name], raw, file) if raw.name in starts else (0,) * len(raw.shape)
            pieces.setdefault(raw.name, []).append((start, raw))
    return {name: _joined(name, parts, where) for name, parts in pieces.items()}, aliases


def _own_pieces(
    pieces: Iterable[RawTensor],
    metadata: Mapping[str, str],
    file: Path,
    others: Callable[[], Mapping[str, StoredTensor]],
) -> dict[str, StoredTensor]:
    """Return all tensors of which some rank has pieces, with the `pieces` of this rank, which are those of its `file`."""
    starts, wholes = _table(metadata, OFFSETS, file), _table(metadata, _WHOLES, file)
    mine = {raw.name: raw for raw in pieces}
    found = {}
    for name, entry in wholes.items():
        if not _is_form(entry):
            raise CheckpointError(f"{file}: the shape of {name} is damaged")
        dtype, shape = entry[0], tuple(entry[1:])
        parts: tuple[tuple[tuple[int, ...], RawTensor], ...] = ()
        if (raw := mine.pop(name, None)) is not None:
            start = _start(starts.get(name), raw, file)
            ends = (begin + size for begin, size in zip(start, raw.shape, strict=True))
            if raw.dtype != dtype or len(start) != len(shape) or any(map(operator.gt, ends, shape)):
                raise CheckpointError(
                    f"{file}: the piece of {name} is not one of a tensor of {dtype} and shape {list(shape)}"
                )
            parts = ((start, raw),)
        found[name] = StoredTensor(name, dtype, shape, parts, others=others)
    if mine:
        raise CheckpointError(f"{file}: the shape of {min(mine)} is damaged")
    return found


def weights_in(path: Path) -> Path:
    """Return the directory whose `model/` has the weights to use: that of the averaged weights if `path` has one, else `path`."""
    averaged = path / AVERAGED
    return averaged if averaged.is_dir() else path


def read_weights(path: Path) -> list[RawTensor]:
    """Return the model's tensors of the checkpoint `path`, whole, with all aliases. The bytes are not converted.

    If the checkpoint has averaged weights, these are returned. Raises CheckpointError if the checkpoint holds no tensors.
    """
    stored, aliases = read_tensors(weights_in(path) / "model")
    for alias, owner in aliases.items():
        if owner not in stored:
            raise CheckpointError(f"{path}: {alias} is tied to {owner}, which is not there")
        stored[alias] = stored[owner]
    if not stored:
        raise CheckpointError(f"{path} holds no model/*.safetensors: nothing to export")
    return [RawTensor(name, tensor.dtype, tensor.shape, tensor.read) for name, tensor in stored.items()]


def _is_form(entry: Any) -> bool:
    """Return whether `entry` is an element type with the sizes of the dimensions of a tensor."""
    if not isinstance(entry, list) or not entry or not isinstance(entry[0], str):
        return False
    return entry[0] in ITEM_BYTES and all(map(COUNT.holds, entry[1:]))


def _aliases(metadata: Mapping[str, str], file: Path) -> dict[str, str]:
    return {name: str(owner) for name, owner in _table(metadata, "aliases", file).items()}


def _table(metadata: Mapping[str, str], key: str, file: Path) -> dict[str, Any]:
    try:
        check_kinds(table := parse_json(metadata.get(key, "{}")), {})
        return dict(table)
    except ValueError:
        raise CheckpointError(f"{file}: its metadata {key!r} is damaged") from None


def _start(entry: Any, raw: RawTensor, file: Path) -> tuple[int, ...]:
    start = entry.get("saved_offsets") if isinstance(entry, dict) else None
    if not isinstance(start, list) or len(start) != len(raw.shape) or not all(map(COUNT.holds, start)):
        raise CheckpointError(f"{file}: the position of {raw.name} in its tensor is damaged")
    return tuple(start)


def _joined(name: str, parts: list[tuple[tuple[int, ...], RawTensor]], directory: Path) -> StoredTensor:
    if len(parts) > 1:
        parts = [part for part in parts if 0 not in part[1].shape] or parts[:1]  # an empty piece covers nothing
    first = parts[0][1]
    if len(parts) == 1 and not any(parts[0][0]):
        return StoredTensor(name, first.dtype, first.shape, tuple(parts), is_in_order=True)
    if any(raw.dtype != first.dtype or len(raw.shape) != len(first.shape) for _, raw in parts):
        raise CheckpointError(f"{directory}: the pieces of {name} differ in element type or number of dimensions")
    parts = sorted(parts, key=lambda part: part[0])
    boxes = [(start, raw.shape) for start, raw in parts]
    shape = tuple(max(start[i] + size[i] for start, size in boxes) for i in range(len(first.shape)))
    is_in_order = _are_in_order(boxes, shape)
    if not is_in_order and not _is_filled(boxes, shape):
        raise CheckpointError(f"{directory}: the pieces of {name} do not form one tensor of shape {list(shape)}")
    return StoredTensor(name, first.dtype, shape, tuple(parts), is_in_order)


def _are_in_order(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the elements of the boxes, one box after the other, are those of a tensor, row-major."""
    end = 0
    for start, size in boxes:
        begin, is_inside = 0, False  # inside: a dimension before has several indices, so this one must have all
        for first, length, whole in zip(start, size, shape, strict=True):
            if is_inside and length != whole:
                return False
            begin = begin * whole + first
            is_inside = is_inside or length > 1
        if begin != end:
            return False
        end += math.prod(size)
    return end == math.prod(shape)


def _is_filled(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Return whether each element of a tensor is in exactly one of the boxes."""
    is_covered = sum(math.prod(size) for _, size in boxes) == math.prod(shape)
    return is_covered and not any(_overlap(a, b) for a, b in itertools.combinations(boxes, 2))


def _overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(map(max, a[0], b[0]))
    end = tuple(min(i + n, j + m) for i, n, j, m in zip(*a, *b, strict=True))
    shape = tuple(e - s for s, e in zip(start, end, strict=True))
    return (start, shape) if all(size > 0 for size in shape) else None


def _slices(box: Box, origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(i - o, i - o + n) for i, n, o in zip(*box, origin, strict=True))
