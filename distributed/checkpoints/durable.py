"""Write files that survive a crash: the content is written and fsynced before the file gets its name."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 1 << 20
# Bytes per system call, so that a signal handler does not wait until gigabytes are written, and so that the bytes are still in
# the processor's cache when their digest is computed.
_WRITE_BYTES = 2 << 20
_digests: contextvars.ContextVar[dict[Path, tuple[int, str]] | None] = contextvars.ContextVar("_digests", default=None)
Allocate = Callable[[Path, int], memoryview]
_allocate: contextvars.ContextVar[Allocate | None] = contextvars.ContextVar("_allocate", default=None)


@contextlib.contextmanager
def kept_in_memory(allocate: Allocate) -> Iterator[None]:
    """Let `write_file` copy its bytes into the memory that `allocate(path, num_bytes)` returns, instead of a file, in this block."""
    token = _allocate.set(allocate)
    try:
        yield
    finally:
        _allocate.reset(token)


def memory_for(path: Path, num_bytes: int) -> memoryview | None:
    """Return the memory for the content of a new file inside `kept_in_memory`, and None outside of it."""
    allocate = _allocate.get()
    return None if allocate is None else allocate(path, num_bytes)


@contextlib.contextmanager
def digests_of_written() -> Iterator[dict[Path, tuple[int, str]]]:
    """Yield a dict that gets the number of bytes and the xxh3_128 digest of each file that `write_file` writes in this block.

    The digest is that of the bytes in memory. It is computed while they are written, so the file is not read again.
    """
    found: dict[Path, tuple[int, str]] = {}
    token = _digests.set(found)
    try:
        yield found
    finally:
        _digests.reset(token)


def write_file(path: Path, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write a new file of `num_bytes` bytes and fsync it.

    The file gets its full length first, so that a failed save still shows how much space it needed. Raises OSError if
    the file exists or the disk is full or broken.
    """
    if (memory := memory_for(path, num_bytes)) is not None:
        start = 0
        for chunk in chunks:
            memory[start : start + len(chunk)] = chunk
            start += len(chunk)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, num_bytes)
        if (digests := _digests.get()) is None:
            _write_all(fd, chunks)
        else:
            import xxhash

            digest = xxhash.xxh3_128()
            _write_all(fd, chunks, digest.update)
            digests[path] = (num_bytes, digest.hexdigest())
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


def _write_all(
    fd: int, chunks: Iterable[bytes | memoryview], on_written: Callable[[memoryview], None] = lambda part: None
) -> None:
    """Write `chunks` and call `on_written` with each part that has been written.

    Small chunks are gathered, so that thousands of small tensors do not need thousands of system calls.
    """
    pending = bytearray()
    for chunk in chunks:
        if len(chunk) < _BUFFER_BYTES:
            pending += chunk
        if len(pending) >= _BUFFER_BYTES or len(chunk) >= _BUFFER_BYTES:
            _put(fd, memoryview(bytes(pending)), on_written)
            pending.clear()
        if len(chunk) >= _BUFFER_BYTES:
            _put(fd, memoryview(chunk), on_written)
    _put(fd, memoryview(pending), on_written)


def _put(fd: int, view: memoryview, on_written: Callable[[memoryview], None]) -> None:
    while len(view):
        count = os.write(fd, view[:_WRITE_BYTES])
        on_written(view[:count])
        view = view[count:]
