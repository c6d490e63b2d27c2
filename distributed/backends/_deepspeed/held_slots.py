"""Keep the optimizer's state of a checkpoint until the engine exists, which decides which part of it this rank needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from distributed.backends._torch.sharding import boxes
from distributed.backends._torch.tensor_io import tensor_of
from distributed.checkpoints.shards import StoredTensor
from distributed.checkpoints.tensor_file import RawTensor, copy_all
from distributed.checkpoints.verifying import saved_by


@dataclasses.dataclass(frozen=True)
class HeldSlot:
    """One tensor of a checkpoint, of the shape of a parameter. `dtype` is its element type in the optimizer."""

    stored: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.stored.shape)

    def copy_to(self, flat: torch.Tensor, start: int) -> None:
        """Fill `flat` with the elements from `start` on, row-major."""
        for index, part in boxes(self.shape, flat, start):
            shape = tuple(part.shape)
            part.copy_(tensor_of(self.stored.dtype, shape, self.stored.read((index, shape))))

    def whole(self, device: torch.device) -> torch.Tensor:
        """Return the whole tensor."""
        return tensor_of(self.stored.dtype, self.stored.shape, self.stored.read()).to(device, self.dtype, copy=True)


class HeldSlots:
    """The optimizer's tensors of a checkpoint.

    What this rank itself has saved is read at once: ZeRO gives it the same part again if the number of ranks is the same. Whatever else
    it needs is read from the files of the other ranks when the engine exists.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._slots: dict[tuple[torch.Tensor, str], HeldSlot] = {}

    def add(
        self, parameter: torch.Tensor, slot: str, stored: StoredTensor, dtype: torch.dtype
    ) -> list[Callable[[], None]]:
        """Keep a tensor. Return functions that read the pieces that this rank has saved. They may run in any thread."""
        stored = stored.in_full()
        readers: list[Callable[[], None]] = []
        pieces = []
        for start, raw in stored.pieces:
            piece = raw
            if self._world_size == 1 or saved_by(raw.file, self._world_size) == self._rank:
                memory = torch.empty(raw.num_bytes, dtype=torch.uint8).numpy().data
                readers.append(functools.partial(copy_all, [raw], memory))
                piece = RawTensor(raw.name, raw.dtype, raw.shape, _reader(memory))
            pieces.append((start, piece))
        self._slots[parameter, slot] = HeldSlot(stored._replace(pieces=tuple(pieces)), dtype)
        return readers

    def __iter__(self) -> Iterator[tuple[torch.Tensor, str, HeldSlot]]:
        """Yield (parameter, name of the slot, tensor)."""
        return ((parameter, slot, held) for (parameter, slot), held in self._slots.items())

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, whole, in the optimizer."""
        return sum(held.shape.numel() * held.dtype.itemsize for held in self._slots.values())


def _reader(memory: memoryview) -> Callable[[], memoryview]:
    return lambda: memory
