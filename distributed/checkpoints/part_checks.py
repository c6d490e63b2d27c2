"""Compare the large parts of a checkpoint's files with their digests while a load reads them, so that they are read once."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_active: contextvars.ContextVar[PartChecks | None] = contextvars.ContextVar("_active", default=None)


@dataclass(frozen=True, eq=False)
class FilePart:
    """A part of a file of a checkpoint: its first byte, its size in bytes and its digest. Equal only to itself."""

    file: Path
    begin: int
    size: int
    digest: str


class PartChecks:
    """Large parts of files, and which of them have been read. `note` may be called from several threads."""

    def __init__(self) -> None:
        self._parts: dict[tuple[Path, int], FilePart] = {}
        self._read: set[FilePart] = set()
        self._damaged: set[FilePart] = set()

    @contextlib.contextmanager
    def of(self, parts: Iterable[FilePart]) -> Iterator[None]:
        """Let files that are opened within the block report what is read of `parts`."""
        self._parts = {(part.file, part.begin): part for part in parts}
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def part(self, file: Path, begin: int, size: int) -> FilePart | None:
        """Return the part that consists of these bytes, or None if there is none or it has been read already."""
        part = self._parts.get((file, begin))
        return part if part is not None and part.size == size and part not in self._read else None

    def note(self, part: FilePart, digest: str) -> None:
        """Record that `part` has been read, and the digest of what was read."""
        (self._read if digest == part.digest else self._damaged).add(part)

    @property
    def damaged(self) -> list[FilePart]:
        """The parts in which other bytes were read than were saved."""
        return sorted(self._damaged, key=lambda part: (part.file, part.begin))

    @property
    def unread(self) -> list[FilePart]:
        """The parts that have not been read."""
        done = self._read | self._damaged
        return [part for part in self._parts.values() if part not in done]


def active_checks() -> PartChecks | None:
    """Return the checks of the load that runs, or None."""
    return _active.get()
