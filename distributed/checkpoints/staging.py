"""Copy the files of a save into memory, so that they can be written to the disk later. Loads no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.digests import FileRecord
from distributed.checkpoints.durable import kept_in_memory, records_of_written, size_text, write_file
from distributed.config.memory import available_bytes
from distributed.errors import TrainingError


def host_memory(num_bytes: int) -> memoryview:
    """Return new memory of `num_bytes` bytes."""
    import numpy

    return numpy.empty(num_bytes, numpy.uint8).data


class Copying:
    """Allocate memory for the copy that `checkpoint_async` makes of an engine's state. Engines may override the methods."""

    def allocate(self, num_bytes: int) -> memoryview:
        """Return new memory of `num_bytes` bytes for a copy of the state."""
        return host_memory(num_bytes)

    @property
    def is_on_all_ranks(self) -> bool:
        """Return whether each rank copies a part of the weights, and not only the main process."""
        return False

    def num_bytes(self) -> tuple[int, int]:
        """Return (bytes that this rank copies at least, estimated bytes), both when the optimizer has its state.

        An optimizer that is not one of torch's has its state after the first update. Until then, the estimate is two tensors for
        each parameter that is trained, as Adam keeps, and none are certain.
        """
        return 0, 0


class Staging:
    """A copy of the files of one save. Its memory is kept for the next save.

    Args:
        allocate: returns new memory of the given number of bytes.
    """

    def __init__(self, allocate: Callable[[int], memoryview] = host_memory) -> None:
        self._allocate = allocate
        self._stage = Path()
        # By the name of the file in its checkpoint: its memory, and the part of it that the last save has used, with the sizes of the
        # chunks.
        self._kept: dict[Path, memoryview] = {}
        self._used: dict[Path, tuple[memoryview, Sequence[int]]] = {}
        # By the name of the first file: the names of all files that are copied together, and what copies them.
        self._copies: dict[Path, tuple[list[Path], Callable[..., bool]]] = {}
        self._names: list[Path] = []  # of the files of the last save

    @contextlib.contextmanager
    def copying(self, stage: Path) -> Iterator[None]:
        """Make `write_file` copy files below `stage` into memory within the block. Earlier copies are dropped."""
        self._stage, self._names = stage, []
        with kept_in_memory(self):
            yield

    def write(self) -> dict[Path, FileRecord]:
        """Write the copied files durably. Return the record of each. Raises OSError if the disk fails or there is no stage."""
        with records_of_written() as written:
            for name in self._names:
                for directory in [*reversed(name.parents)][1:]:
                    (self._stage / directory).mkdir(exist_ok=True)
                memory, sizes = self._used[name]
                write_file(self._stage / name, _cut(memory, sizes), len(memory))
        return written

    def release(self) -> None:
        """Release the memory, and all references to what was copied."""
        self._kept, self._used, self._copies, self._names = {}, {}, {}, []

    def memory_for(self, path: Path, sizes: Sequence[int]) -> memoryview:
        """See `KeptFiles`. Raises TrainingError if there is not enough memory."""
        name, num_bytes = path.relative_to(self._stage), sum(sizes)
        for first in [first for first, (names, _) in self._copies.items() if name in names]:
            del self._copies[first]  # the file gets another layout
        kept = self._kept.get(name)
        if kept is None or len(kept) < num_bytes:
            self._kept.pop(name, None)
            self._used.pop(name, None)
            check_memory(num_bytes)
            kept = self._kept[name] = self._allocate(num_bytes)
        self._used[name] = kept[:num_bytes], sizes
        self._names.append(name)
        return self._used[name][0]

    def repeats(self, paths: Sequence[Path], copy: Callable[..., bool]) -> None:
        """See `KeptFiles`."""
        names = [path.relative_to(self._stage) for path in paths]
        self._copies[names[0]] = names, copy

    def copy_again(self, first: Path, *args: Any) -> bool:
        """See `KeptFiles`."""
        names, copy = self._copies.get(first.relative_to(self._stage), ([], None))
        if copy is None or not copy(*args):
            return False
        self._names += names
        return True


def _cut(memory: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    """Yield the chunks of `memory`."""
    for size in sizes:
        yield memory[:size]
        memory = memory[size:]


def check_memory(num_bytes: int) -> None:
    """Raise TrainingError if `num_bytes` bytes of memory are not available on this machine, or in this container."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise TrainingError(
            f"checkpoint_async=True needs {size_text(num_bytes)} of memory for a copy of the state, and {size_text(available)} are"
            " available: set checkpoint_async=False"
        )
