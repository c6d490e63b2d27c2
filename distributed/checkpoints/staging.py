"""Copy the files of a save into memory, so that they can be written to the disk later. Loads no framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
        self._kept: dict[Path, memoryview] = {}  # by the name of the file in its checkpoint
        self._files: list[tuple[Path, memoryview, Sequence[int]]] = []  # with the sizes of their chunks

    @contextlib.contextmanager
    def copying(self, stage: Path) -> Iterator[None]:
        """Make `write_file` copy files below `stage` into memory within the block. Earlier copies are dropped."""
        self._files = []
        with kept_in_memory(lambda path, sizes: self._memory_for(stage, path, sizes)):
            yield

    def write(self) -> dict[Path, FileRecord]:
        """Write the copied files durably. Return the record of each. Raises OSError if the disk fails."""
        with records_of_written() as written:
            for path, memory, sizes in self._files:
                write_file(path, _cut(memory, sizes), len(memory))
        return written

    def _memory_for(self, stage: Path, path: Path, sizes: Sequence[int]) -> memoryview:
        name, num_bytes = path.relative_to(stage), sum(sizes)
        kept = self._kept.get(name)
        if kept is None or len(kept) < num_bytes:
            self._kept.pop(name, None)
            check_memory(num_bytes)
            kept = self._kept[name] = self._allocate(num_bytes)
        self._files.append((path, kept[:num_bytes], sizes))
        return kept[:num_bytes]


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
