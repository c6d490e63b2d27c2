"""Write and truncate TensorBoard's event files without TensorFlow. A record is a protobuf with its length and checksums."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_PREFIX = "events.out.tfevents."
_HEADER = struct.Struct("<QI")  # length of the data, checksum of the length
_FOOTER = struct.Struct("<I")  # checksum of the data


class EventFile:
    """A new event file in `directory` that is read after the existing ones. It begins with the events `first`."""

    def __init__(self, directory: Path, first: Sequence[Any] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        last = max((_time_of(path) for path in files_in(directory)), default=0)
        # Files are read in the order of their names, and two attempts may begin in the same second. So each gets a later time.
        began = max(int(time.time()), last + 1)
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
            with contextlib.suppress(OSError):  # an incomplete record would hide all records after it
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        self._file.close()


def cut(directory: Path, is_kept: Callable[[Any], bool]) -> bool:
    """Truncate each file after the last event for which `is_kept` is true, in place, because that works on a full disk too.

    Delete a file without any such event. Return whether a file is left.
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
    """Yield (byte at which the record ends, event), up to the first record that a killed writer left incomplete."""
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


_ROW = 256  # bytes of a row in `_register_of_rows`
_LARGE = 8192  # bytes from which rows are faster


def _checksum(data: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files use."""
    crc, table = 0xFFFFFFFF, _TABLE
    if len(data) >= _LARGE:  # an image
        crc = _register_of_rows(data)
    else:
        for byte in data:
            crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _register_of_rows(data: bytes) -> int:
    """Return the register of the CRC after `data`, computed for all rows of `_ROW` bytes at once.

    The register is linear. The register of two parts is the XOR of two registers: that of the first part, moved over as many zeros
    as the second part is long, and that of the second part alone. Zeros at the front change nothing if the register begins with 0.
    The first four bytes are inverted, so that it does begin with 0.
    """
    import numpy

    content = numpy.frombuffer(bytes(byte ^ 0xFF for byte in data[:4]) + data[4:], numpy.uint8)
    rows = numpy.concatenate([numpy.zeros(-len(content) % _ROW, numpy.uint8), content]).reshape(-1, _ROW)
    moved = _moved_bits()
    register = 0
    for of_row in _registers(rows, numpy.zeros(len(rows), numpy.uint32)).tolist():
        rest, register = register, of_row
        while rest:
            lowest = rest & -rest
            register ^= moved[lowest.bit_length() - 1]
            rest ^= lowest
    return int(register)


@functools.cache
def _moved_bits() -> list[int]:
    """Return the register that each of its 32 bits becomes when a row of zeros follows."""
    import numpy

    bits = numpy.left_shift(numpy.uint32(1), numpy.arange(32, dtype=numpy.uint32))
    found: list[int] = _registers(numpy.zeros((32, _ROW), numpy.uint8), bits).tolist()
    return found


def _registers(rows: Any, registers: Any) -> Any:
    """Return the register of each row, beginning with `registers`."""
    import numpy

    table = numpy.array(_TABLE, numpy.uint32)
    for column in numpy.ascontiguousarray(rows.T):
        registers = registers >> 8 ^ table[(registers ^ column) & 0xFF]
    return registers
