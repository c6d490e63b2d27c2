"""Write and cut TensorBoard's event files without TensorFlow. A record is a protobuf with its length and checksums."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "events.out.tfevents."
_HEADER = struct.Struct("<QI")  # length, checksum of it
_FOOTER = struct.Struct("<I")  # checksum of the data


class EventFile:
    """A new file in `directory`, which readers take after those that are there. It begins with the events `first`."""

    def __init__(self, directory: Path, first: Sequence[Any] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        last = max((_time_of(path) for path in files_in(directory)), default=0)
        began = max(int(time.time()), last + 1)  # names are read in order, and two attempts may begin in one second
        self.path = directory / f"{_PREFIX}{began:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = self.path.open("xb", buffering=0)
        self._first = b"".join(_record(event.SerializeToString()) for event in first)
        self._end = 0

    def write(self, event: Any) -> None:
        """Append one `Event` as a whole, or nothing. Raises OSError."""
        data = _record(event.SerializeToString())
        if not self._end:
            data = self._first + data
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # an incomplete record would hide all that follow
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        self._file.close()


def cut(directory: Path, is_kept: Callable[[Any], bool]) -> bool:
    """Take out of each file what follows the last event that `is_kept`, in place: that works on a full disk too.

    Returns whether anything is left; a file without any such event goes.
    """
    is_any = False
    for path in files_in(directory):
        end = kept = 0
        for end, event in _events(path.read_bytes()):
            if is_kept(event):
                kept = end
        if kept:
            is_any = True
            os.truncate(path, kept)
        else:
            path.unlink()
    return is_any


def files_in(directory: Path) -> list[Path]:
    """Return the event files of `directory`, in the order in which they are read."""
    return sorted(directory.glob(f"{_PREFIX}*"))


def _time_of(path: Path) -> int:
    word = path.name.removeprefix(_PREFIX).partition(".")[0]
    return int(word) if word.isdecimal() else 0


def _events(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield (the byte at which it ends, event), up to the first record that a killed writer left unfinished."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    end = 0
    while end + _HEADER.size <= len(content):
        begin = end + _HEADER.size
        end = begin + _HEADER.unpack_from(content, end)[0] + _FOOTER.size
        if end > len(content):
            return
        try:
            event = Event.FromString(content[begin : end - _FOOTER.size])
        except DecodeError:
            return
        yield end, event


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(_checksum(length)) + data + _FOOTER.pack(_checksum(data))


def _table() -> tuple[int, ...]:
    """Return the table of CRC-32C (Castagnoli) by byte."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def _checksum(data: bytes) -> int:
    """Return the masked CRC-32C of TFRecord files."""
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
