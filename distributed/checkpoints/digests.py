"""Digests (xxh3_128) of the files of a checkpoint and of their parts. They detect accidental damage, not forgery."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from distributed.config.kinds import COUNT, OBJECT, TEXT, check_kinds, list_of

# A chunk of at least this size, such as a large tensor, is a part of its file with a digest of its own. All other parts are smaller.
LARGE_BYTES = 1 << 20
# Bytes per system call, so that a signal handler does not wait until gigabytes are written or read, and so that the bytes are still
# in the processor's cache when their digest is computed.
BLOCK_BYTES = 256 << 10
# The most parts of all files of a checkpoint. With more, the manifest would be too large, and a load verifies whole files first.
MAX_PARTS = 50_000
_RECORD = {"bytes": COUNT, "xxh3_128": TEXT, "parts": OBJECT}
_PARTS = {"bytes": list_of(COUNT), "xxh3_128": list_of(TEXT)}


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and digest of one file of a checkpoint.

    `parts` are the (bytes, digest) of its consecutive parts if one of them is large. A reader of one part can verify it alone. A file
    that was not written in one piece by this package has no parts.
    """

    bytes: int
    xxh3_128: str
    parts: tuple[tuple[int, str], ...] = ()

    def to_json(self, *, with_parts: bool = True) -> dict[str, Any]:
        """Return the record for JSON."""
        content: dict[str, Any] = {"bytes": self.bytes, "xxh3_128": self.xxh3_128}
        if self.parts and with_parts:
            sizes, digests = zip(*self.parts, strict=True)
            content["parts"] = {"bytes": list(sizes), "xxh3_128": list(digests)}
        return content

    @classmethod
    def from_json(cls, content: Any) -> FileRecord:
        """Return the record of which `to_json` returned `content`.

        Raises KeyError or ValueError, whose message follows after the name of the file in a sentence, if it did not.
        """
        check_kinds(content, _RECORD)
        parts = content.get("parts", {"bytes": [], "xxh3_128": []})
        check_kinds(parts, _PARTS)
        sizes, digests = parts["bytes"], parts["xxh3_128"]
        if len(sizes) > MAX_PARTS:
            raise ValueError(f"has {len(sizes)} parts, {MAX_PARTS} are allowed")
        if len(sizes) != len(digests) or (sizes and (sum(sizes) != content["bytes"] or 0 in sizes)):
            raise ValueError("has parts that are not those of a file of its size")
        return cls(content["bytes"], content["xxh3_128"], tuple(zip(sizes, digests, strict=True)))


class FileDigests:
    """Compute the record of a file while it is written."""

    def __init__(self) -> None:
        self._file, self._part = xxhash.xxh3_128(), xxhash.xxh3_128()
        self._bytes = 0  # of the part that has begun
        self._parts: list[tuple[int, str]] = []

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the file."""
        self._file.update(data)
        self._part.update(data)
        self._bytes += len(data)

    def end_part(self) -> None:
        """End a part of the file, if it has any bytes."""
        if self._bytes:
            self._parts.append((self._bytes, self._part.hexdigest()))
            self._bytes = 0
            self._part.reset()

    def record(self) -> FileRecord:
        """Return the record of the file, after all of its parts have ended."""
        is_large = 1 < len(self._parts) <= MAX_PARTS and any(size >= LARGE_BYTES for size, _ in self._parts)
        size = sum(size for size, _ in self._parts)
        return FileRecord(size, self._file.hexdigest(), tuple(self._parts) if is_large else ())


def num_parts(records: Iterable[FileRecord]) -> int:
    """Return the number of the parts of all files."""
    return sum(len(record.parts) for record in records)


def file_digest(path: Path, stop: threading.Event | None = None) -> str:
    """Return the digest of a file in hex. If `stop` is set meanwhile, it is that of the bytes before."""
    with opened(path) as file:
        return stream_digest(file, stop)


def stream_digest(stream: Any, stop: threading.Event | None = None, size: int | None = None) -> str:
    """Return the digest of an open binary file, or of its next `size` bytes, as `file_digest` does."""
    most = BLOCK_BYTES if size is None else min(BLOCK_BYTES, size)
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(most))
    while (stop is None or not stop.is_set()) and size != 0 and (count := stream.readinto(block[:size])):
        digest.update(block[:count])
        size = None if size is None else size - count
    return digest.hexdigest()


def opened(path: Path) -> Any:
    """Open a file that is not a link for unbuffered reading."""
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0)
