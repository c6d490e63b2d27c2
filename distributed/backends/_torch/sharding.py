"""Handle tensors of which each rank holds a part: find, write and read this rank's part.

Such a tensor is a DTensor or, while a checkpoint is written, the stand-in for one that an engine keeps in flat pieces.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.tensor_io import (
    dtype_of,
    dtype_word,
    raw_bytes,
    tensor_of,
    wait_for_copies,
    write_file,
)
from distributed.checkpoints.durable import kept_files
from distributed.checkpoints.shards import Box, StoredTensor, name_of_pieces, name_of_whole, sharding_metadata
from distributed.state import WorkerContext

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Pieces = list[tuple[tuple[int, ...], torch.Tensor]]  # (index of the first element in the whole tensor, the piece)
# (name of a tensor, number of this rank's piece, memory of the shape of the piece)
Place = tuple[str, int, torch.Tensor]


class StandIns:
    """Tensors that stand for those of which this rank has pieces. They have a shape and an element type, and no values."""

    def __init__(self) -> None:
        self._pieces: dict[int, tuple[torch.Tensor, Pieces]] = {}  # by the id of the stand-in, which it keeps alive
        self._elements: dict[torch.dtype, torch.Tensor] = {}  # the element of the stand-ins of each type

    def make(self, shape: torch.Size, flat: torch.Tensor, start: int) -> torch.Tensor:
        """Return a stand-in for a tensor of `shape`. `flat` has the elements from `start` on, row-major, that this rank holds.

        Its one element, which stands for all, is NaN if its type has NaN. A tensor without elements is not replaced.
        """
        if shape.numel() == 0:
            return torch.empty(shape, dtype=flat.dtype)
        if (element := self._elements.get(flat.dtype)) is None:
            element = torch.full((), math.nan if flat.is_floating_point() else 0, dtype=flat.dtype)
            self._elements[flat.dtype] = element
        found = element.expand(shape)
        self._pieces[id(found)] = found, boxes(shape, flat, start)
        return found

    def set_data(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Make `value`, which `make` returned, the data of `parameter`, which stands for the same tensor then."""
        parameter.data = value
        if id(value) in self._pieces:
            self._pieces[id(parameter)] = parameter, self._pieces[id(value)][1]

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let `tensors`, which may be stand-ins, stand for nothing any more."""
        for tensor in tensors:
            self._pieces.pop(id(tensor), None)

    def pieces(self, tensor: torch.Tensor) -> Pieces | None:
        """Return this rank's pieces, or None if `tensor` is none of the stand-ins."""
        return self._pieces.get(id(tensor), (None, None))[1]

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """Let `write` write the pieces in place of their stand-ins within the block."""
        token = _stand_ins.set(self)
        try:
            yield
        finally:
            _stand_ins.reset(token)


_stand_ins: contextvars.ContextVar[StandIns | None] = contextvars.ContextVar("_stand_ins", default=None)


def boxes(shape: torch.Size, flat: torch.Tensor, start: int) -> Pieces:
    """Return the elements from `start` on of a tensor of `shape`, which `flat` has, as boxes: at most two for each dimension but the
    last, and one."""
    if start == 0 and flat.numel() == shape.numel() and shape:
        return [((0,) * len(shape), flat.view(shape))] if flat.numel() else []
    if len(shape) < 2:
        return [((start,)[: len(shape)], flat.reshape(flat.shape[: len(shape)]))] if flat.numel() else []
    row, rest = shape[1:].numel(), shape[1:]
    found: Pieces = []
    while flat.numel():
        index, inside = divmod(start, row)
        if inside or flat.numel() < row:  # a part of a row
            size = min(row - inside, flat.numel())
            found += [((index, *at), piece[None]) for at, piece in boxes(rest, flat[:size], inside)]
        else:
            size = flat.numel() - flat.numel() % row
            found.append(((index, *(0 for _ in rest)), flat[:size].view(-1, *rest)))
        flat, start = flat[size:], start + size
    return found


def is_sharded(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor."""
    return _dtensor(tensor) is not None


def is_in_pieces(tensor: torch.Tensor) -> bool:
    """Return whether each rank writes pieces of `tensor`: it is a DTensor, or a stand-in within `StandIns.written`."""
    stand_ins = _stand_ins.get()
    return is_sharded(tensor) or (stand_ins is not None and stand_ins.pieces(tensor) is not None)


def _pieces(tensor: torch.Tensor) -> Pieces:
    """Return the pieces of `tensor` that this rank writes."""
    stand_ins = _stand_ins.get()
    if stand_ins is not None and (pieces := stand_ins.pieces(tensor)) is not None:
        return pieces
    start, shape = box(tensor)
    return [] if 0 in shape else [(start, local(tensor))]


def _dtensor(tensor: Any) -> DTensor | None:
    """Return `tensor` if it is a DTensor, else None. Does not load the DTensor module."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, without a copy.

    No gradient flows through the part. `to_local()` of a DTensor takes 30 us for that, a thousand times in a save.
    """
    sharded = _dtensor(tensor)
    return tensor if sharded is None else sharded._local_tensor


def box(tensor: torch.Tensor) -> Box:
    """Return the offset and shape of this rank's part in the whole tensor."""
    sharded = _dtensor(tensor)
    if sharded is None:
        return (0,) * tensor.dim(), tuple(tensor.shape)
    mesh = sharded.device_mesh
    return _box(sharded.shape, mesh, tuple(mesh.get_coordinate() or ()), sharded.placements)


@functools.lru_cache(maxsize=256)  # weights and their moments have the same boxes
def _box(shape: torch.Size, mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> Box:
    """Return what `box` does. `coordinate` is the place of this rank in `mesh`, which two equal meshes need not share."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    part, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(start), tuple(part)


def are_cut_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both tensors have the same shape, and this rank the same part of both."""
    a, b = _dtensor(one), _dtensor(other)
    if one.shape != other.shape or a is None or b is None:
        return one.shape == other.shape and a is b
    return a.device_mesh == b.device_mesh and a.placements == b.placements


def take_part(pieces: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of `full` into `pieces`. `full` is a whole tensor of the same shape. Not a collective."""
    start, shape = box(pieces)
    for dim, (begin, length) in enumerate(zip(start, shape, strict=True)):
        full = full.narrow(dim, begin if length else 0, length)
    local(pieces).detach().copy_(full)


def write(
    directory: Path, stem: str, tensors: Mapping[str, torch.Tensor], context: WorkerContext, **metadata: str
) -> None:
    """Write this rank's part of `tensors` into `directory`. All ranks must call it.

    The main process writes whole tensors. If all tensors are whole there is one file. Otherwise there is one for the whole tensors, one
    for the pieces of each rank, and further ones if a rank has several pieces of a tensor. If the files are kept in memory and the last
    save had the same tensors there, they are copied to the same places.
    """
    own_file, kept = directory / name_of_pieces(stem, context.rank, context.world_size), kept_files()
    one_file, whole_file = directory / f"{stem}.safetensors", directory / name_of_whole(stem)
    if kept is not None and any(
        kept.copy_again(first, tensors, metadata) for first in (own_file, whole_file, one_file)
    ):
        return
    pieces = {name: _pieces(tensor) for name, tensor in tensors.items() if is_in_pieces(tensor)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in pieces}
    files, places = list[Path](), list[Place]()

    def add(file: Path, parts: Mapping[str, torch.Tensor], number: int, of_file: Mapping[str, str]) -> None:
        files.append(file)
        places.extend((name, number, place) for name, place in write_file(file, parts, of_file).items())

    if context.is_main_process and (whole or not pieces):
        add(whole_file if pieces else one_file, whole, 0, {} if pieces else metadata)
    if pieces:
        wholes = {name: (dtype_word(name, tensors[name]), tensors[name].shape) for name in pieces}
        num_files = max(1, *map(len, pieces.values()))
        for number in range(num_files):
            layer = {name: found[number] for name, found in pieces.items() if number < len(found)}
            starts = {name: start for name, (start, _) in layer.items()}
            of_file = sharding_metadata(starts, wholes if num_files == 1 else None) | ({} if number else metadata)
            part = f"{stem}-{number}" if number else stem
            file = directory / name_of_pieces(part, context.rank, context.world_size)
            add(file, {name: piece for name, (_, piece) in layer.items()}, number, of_file)
    if kept is not None and files:
        kept.repeats(files, _CopyAgain(tensors, metadata, places))


class _CopyAgain:
    """Copy tensors to the places in memory to which they were copied in the last save.

    Args:
        tensors: all tensors that `write` got, by name. They are not kept alive, but the pieces of stand-ins are.
        metadata: what it got as metadata.
        places: where the parts are that this rank writes.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], places: Sequence[Place]
    ) -> None:
        stand_ins = _stand_ins.get()
        cuts = {name: _cut(tensor, stand_ins) for name, tensor in tensors.items()}
        self._tensors = {name: (weakref.ref(tensor), tensor.dtype, cuts[name]) for name, tensor in tensors.items()}
        self._metadata = dict(metadata)
        self._memory = [place for _, _, place in places]
        # The name of each part, and the part itself if it is a piece of a stand-in.
        self._parts = [
            (name, cuts[name][number][1] if isinstance(cuts[name], list) else None) for name, number, _ in places
        ]

    def __call__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bool:
        """Copy `tensors`, if they, their forms and the metadata are the same as before. Return whether they are.

        If the tensors of a rank are in pieces no longer, this shows on all ranks.
        """
        if metadata != self._metadata or tensors.keys() != self._tensors.keys():
            return False
        stand_ins = _stand_ins.get()
        for name, tensor in tensors.items():
            before, dtype, cut = self._tensors[name]
            if before() is not tensor or tensor.dtype is not dtype or not _is_same(_cut(tensor, stand_ins), cut):
                return False
        parts = [local(tensors[name]) if piece is None else piece for name, piece in self._parts]
        if any(part.shape != place.shape for part, place in zip(parts, self._memory, strict=True)):
            return False  # a DTensor got a part of another shape
        if parts:
            with torch.no_grad():
                torch._foreach_copy_(self._memory, parts, non_blocking=True)
        wait_for_copies(parts)
        return True


def _cut(tensor: torch.Tensor, stand_ins: StandIns | None) -> Any:
    """Return what tells how `tensor` is cut into pieces: those of a stand-in, the spec of a DTensor, or the shape."""
    if stand_ins is not None and (pieces := stand_ins.pieces(tensor)) is not None:
        return pieces
    return tensor.shape if (sharded := _dtensor(tensor)) is None else sharded._spec


def _is_same(cut: Any, before: Any) -> bool:
    """Return whether two cuts from `_cut` are equal. Neither pieces nor a spec change, and equal ones need not be recognized."""
    return cut is before or (isinstance(cut, torch.Size) and bool(cut == before))


def read(stored: StoredTensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return a stored tensor in its own element type.

    It is whole and on the CPU, unless `like` is sharded. Then return this rank's part, sharded like `like` and on its
    device.
    """
    cut = _dtensor(like)
    if cut is None:
        return tensor_of(stored.dtype, stored.shape, stored.read())
    from torch.distributed.tensor import DTensor

    part = box(cut)
    piece = tensor_of(stored.dtype, part[1], stored.read(part)).to(local(cut).device)
    return DTensor.from_local(
        piece, cut.device_mesh, cut.placements, run_check=False, shape=torch.Size(stored.shape), stride=cut.stride()
    )


def reader(stored: StoredTensor, tensor: torch.Tensor) -> Callable[[], None] | None:
    """Return a function that fills this rank's part of `tensor` from the file of a stored tensor of the same shape.

    It may run in any thread. A tensor on another device, or of other strides or another element type, needs host memory for a second
    copy of the part meanwhile. Return None where `StoredTensor.reader` does, and for a tensor subclass: `copy` fills such a part.
    """
    part, where = local(tensor).detach(), box(tensor)
    if type(part) is not torch.Tensor or tuple(part.shape) != where[1] or (read_into := stored.reader(where)) is None:
        return None
    dtype = dtype_of(stored.dtype)
    is_plain = part.device.type == "cpu" and part.is_contiguous() and not part.is_conj() and not part.is_neg()
    if is_plain and part.dtype == dtype:
        return functools.partial(read_into, raw_bytes(part))
    return functools.partial(_read_and_copy, read_into, dtype, part)


def _read_and_copy(read_into: Callable[[memoryview], None], dtype: torch.dtype, part: torch.Tensor) -> None:
    host = torch.empty(part.shape, dtype=dtype)
    read_into(raw_bytes(host))
    part.copy_(host)


def copy(stored: StoredTensor, tensor: torch.Tensor) -> None:
    """Fill this rank's part of `tensor` with a stored tensor of the same shape, in the element type of `tensor`."""
    part = box(tensor)
    local(tensor).detach().copy_(tensor_of(stored.dtype, part[1], stored.read(part)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. A collective if `tensor` is sharded."""
    sharded = _dtensor(tensor)
    return tensor if sharded is None else sharded.full_tensor()
