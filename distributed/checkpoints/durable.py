"""Write files that survive a crash: the content is written and fsynced before the file gets its name."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from distributed.checkpoints import digests
from distributed.checkpoints.digests import FileDigests, FileRecord

logger = logging.getLogger(__name__)

_AHEAD_BYTES = 16 << 20  # bytes after which the disk is told to begin
_PAGE_BYTES = 2 << 20  # the size of the largest pages; a change of a page waits while the disk writes it
_SYNC_FILE_RANGE_WRITE = 2  # from <linux/fs.h>

_records: contextvars.ContextVar[dict[Path, FileRecord] | None] = contextvars.ContextVar("_records", default=None)


class KeptFiles(Protocol):
    """Memory that takes the files of a save, one save after the other."""

    def memory_for(self, path: Path, sizes: Sequence[int]) -> memoryview:
        """Return the memory for a new file of chunks of `sizes` bytes."""

    def repeats(self, paths: Sequence[Path], copy: Callable[..., bool]) -> None:
        """Note what copies the content of the files `paths` again, into the same places of the same memory."""

    def copy_again(self, first: Path, *args: Any) -> bool:
        """Take the files that `repeats` got, of which `first` is the first, with the layout of the last save.

        Return False, and take none, if there were none or if what was noted then returns False for `args`.
        """


_kept: contextvars.ContextVar[KeptFiles | None] = contextvars.ContextVar("_kept", default=None)


@contextlib.contextmanager
def kept_in_memory(files: KeptFiles) -> Iterator[None]:
    """Let `write_file` copy its bytes into the memory of `files`, instead of a file, in this block."""
    token = _kept.set(files)
    try:
        yield
    finally:
        _kept.reset(token)


def kept_files() -> KeptFiles | None:
    """Return the files of the `kept_in_memory` block that runs, or None."""
    return _kept.get()


def memory_for(path: Path, sizes: Sequence[int]) -> memoryview | None:
    """Return the memory for a new file of chunks of these sizes inside `kept_in_memory`, and None outside of it."""
    files = kept_files()
    return None if files is None else files.memory_for(path, sizes)


@contextlib.contextmanager
def records_of_written() -> Iterator[dict[Path, FileRecord]]:
    """Yield a dict that gets the record of each file that `write_file` writes in this block.

    The digests are those of the bytes in memory. They are computed while these are written, so the file is not read again.
    """
    found: dict[Path, FileRecord] = {}
    token = _records.set(found)
    try:
        yield found
    finally:
        _records.reset(token)


def write_file(path: Path, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
    """Write a new file of `num_bytes` bytes and fsync it.

    The file gets its full length first, so that a failed save still shows how much space it needed. Raises OSError if
    the file exists or the disk is full or broken.
    """
    if (memory := memory_for(path, [num_bytes])) is not None:
        start = 0
        for chunk in chunks:
            memory[start : start + len(chunk)] = chunk
            start += len(chunk)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, num_bytes)
        if (records := _records.get()) is None:
            _write_all(_Output(fd, None), chunks)
        else:
            found = FileDigests()
            _write_all(_Output(fd, found), chunks)
            records[path] = found.record()
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


def make_directory(path: Path) -> None:
    """Create a directory, with its parents, whose name survives a power loss. Do nothing if it exists."""
    if not path.is_dir():
        path.mkdir(parents=True, exist_ok=True)
        sync(path.parent)


class _Output:
    """Write a file from its beginning. Pass what has been written to `found`, if given.

    The disk begins before the file is complete, so that the fsync has less to wait for. Linux otherwise keeps the bytes in memory
    until the fsync or for up to 30 s, unless there are many.
    """

    def __init__(self, fd: int, found: FileDigests | None) -> None:
        self.fd, self._found = fd, found
        self._end = self._begun = 0  # bytes

    def put(self, view: memoryview) -> None:
        """Write the bytes, which are a part of the file with a digest of its own."""
        while len(view):
            count = os.write(self.fd, view[: digests.BLOCK_BYTES])
            if self._found is not None:
                self._found.update(view[:count])
            view = view[count:]
            self._end += count
            if self._end - self._begun >= _AHEAD_BYTES:
                whole = self._end // _PAGE_BYTES * _PAGE_BYTES
                begin_writeback(self.fd, self._begun, whole - self._begun)
                self._begun = whole
        if self._found is not None:
            self._found.end_part()


def _write_all(output: _Output, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks`. Each large chunk is a part of the file.

    Small chunks are gathered, so that thousands of small tensors do not need thousands of system calls.
    """
    pending = bytearray()
    for chunk in chunks:
        if len(pending) + len(chunk) >= digests.LARGE_BYTES:
            output.put(memoryview(bytes(pending)))
            pending.clear()
        if len(chunk) >= digests.LARGE_BYTES:
            output.put(memoryview(chunk))
        else:
            pending += chunk
    output.put(memoryview(pending))


def begin_writeback(fd: int, begin: int, num_bytes: int) -> None:
    """Let the disk begin to write a part of a file, and do not wait for it. An fsync is still needed, and reports errors.

    Nothing happens where the system cannot do it (see sync_file_range(2) of Linux).
    """
    if (call := _sync_file_range()) is not None:
        call(fd, begin, num_bytes, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Any:
    """Return the function of the C library, or None if there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range if sys.platform == "linux" else None
    except (OSError, AttributeError):
        return None
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
