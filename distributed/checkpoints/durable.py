"""Write files that survive a crash: the content is written and fsynced before the file gets its name."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
_WRITE_BYTES = 16 << 20  # bytes per system call, so that a signal handler does not wait until gigabytes are written


def write_file(path: Path, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write a new file of `num_bytes` bytes and fsync it.

    The file gets its full length first, so that a failed save still shows how much space it needed. Raises OSError if
    the file exists or the disk is full or broken.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, num_bytes)
        _write_all(fd, chunks)
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write `path` atomically and durably, replacing an existing file. After an OSError the old file is unchanged."""
    stage = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_file(stage, chunks, num_bytes)
        stage.rename(path)
    except BaseException:
        stage.unlink(missing_ok=True)
        raise
    sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Write a small file atomically, without fsync. A failing disk is logged as a warning and does not fail the run."""
    stage = path.with_name(f".{path.name}.tmp")
    try:
        stage.write_text(text, encoding="utf-8")
        stage.replace(path)
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            stage.unlink()


def size_text(num_bytes: int) -> str:
    """Return a size for people to read, such as `1.5 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def sync(path: Path) -> None:
    """Fsync a file or a directory. The names in a directory survive a power loss only after its fsync."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks`.

    Small ones are gathered, so that thousands of small tensors do not need thousands of system calls.
    """
    pending = bytearray()
    for chunk in chunks:
        if len(chunk) < _BUFFER_BYTES:
            pending += chunk
        if len(pending) >= _BUFFER_BYTES or len(chunk) >= _BUFFER_BYTES:
            _put(fd, memoryview(bytes(pending)))
            pending.clear()
        if len(chunk) >= _BUFFER_BYTES:
            _put(fd, memoryview(chunk))
    _put(fd, memoryview(pending))


def _put(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view[:_WRITE_BYTES]) :]
