"""Read JSON Lines files that somebody else may have written, within limits; single JSON and YAML files belong to `reading`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from distributed.config.reading import (
    MAX_CONTAINERS,
    LimitError,
    num_containers,
    num_separators,
    open_regular,
    parsed,
)

MAX_LINE_BYTES = 1 << 20  # a longer line is left out
JOURNAL = (32 << 20, MAX_CONTAINERS, 1_500_000)  # of a file: bytes, lists and objects, values and names
METRICS = (256 << 20, 3_000_000, 50_000_000)  # the same of one with a line for each log line
# Bytes of memory: of the lines of a journal, enough for 120,000 events of 150 bytes; of the log lines of a run, enough for 1,000,000
# of 12 numbers, and their times.
JOURNAL_MEMORY, METRICS_MEMORY = 64 << 20, 3 << 29
_ENTRY_BYTES = 100  # of a dict, for a name that is stored once
# Names that are stored once: of all lines, and of an object. To look up more of them takes longer than to store them again.
_MOST_SHARED, _MOST_IN_OBJECT = 50_000, 20_000
_CONTAINERS = {dict, list}


def json_lines(path: Path, most: tuple[int, int, int], begin: int = 0, end: int | None = None) -> Iterator[Any]:
    """Yield the value of each line of a JSON Lines file, from byte `begin` to `end`.

    Lines that are not JSON, such as one that a killed writer left incomplete, and lines beyond a limit are left out.

    Args:
        path: the file.
        most: the largest numbers of bytes, of lists and objects, and of values and names: `JOURNAL` or `METRICS`.
        begin: the byte at which the first line begins.
        end: the byte at which the last line ends, or None for the end of the file.

    Raises:
        OSError: the file cannot be opened.
        LimitError: the file is not a regular one, or is larger than `most`.
    """
    most_bytes, most_containers, most_values = most
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        left = (size if end is None else min(end, size)) - begin
        if left > most_bytes:
            raise LimitError(f"has {left} bytes, {most_bytes} are allowed")
        file.seek(begin)
        containers = separators = 0
        for chunk in _chunks(file, left):
            containers += num_containers(chunk)
            separators += num_separators(chunk)
        if containers > most_containers:
            raise LimitError(f"has more than {most_containers} lists and objects")
        if containers + separators > most_values:
            raise LimitError(f"has more than {most_values} values and names")
        file.seek(begin)
        while left > 0 and (line := file.readline(left)):
            left -= len(line)
            try:
                value = parsed(line, errors="replace") if len(line) <= MAX_LINE_BYTES else None
            except ValueError:
                continue
            if value is not None:
                yield value


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, or those that it has."""
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        size -= len(chunk)
        yield chunk


class Memory:
    """The memory that values of JSON may take together.

    Args:
        num_bytes: the limit.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit = self._left = num_bytes
        self._names: dict[str, str] = {}
        self._num_not_shared = 0  # names that are stored once for each object

    @property
    def num_names(self) -> int:
        """Return the number of different names in the values.

        If there are more than 50,000, or more than 20,000 in one object, some may count several times.
        """
        return len(self._names) + self._num_not_shared

    def take(self, value: Any) -> Any:
        """Return an equal value that shares its names with the values before it. Raises LimitError if all values take too much memory."""
        taken = self._shared(value)
        self._left -= sys.getsizeof(taken)
        if self._left < 0:
            raise LimitError(f"has lines that take more than {self._limit} bytes of memory")
        return taken

    def _shared(self, value: Any) -> Any:
        """Return an equal value that shares its names, and count what is inside it."""
        if type(value) is dict:
            names, before = self._names, len(self._names)
            kinds = set(map(type, value.values()))
            is_flat = not kinds & _CONTAINERS
            is_full = len(names) + len(value) > _MOST_SHARED and not value.keys() <= names.keys()
            if len(value) > _MOST_IN_OBJECT or is_full:
                self._num_not_shared += len(value)
                self._left -= sum(map(sys.getsizeof, value))
                value = value if is_flat else {name: self._shared(inner) for name, inner in value.items()}
            else:
                inner = value.values() if is_flat else map(self._shared, value.values())
                value = dict(zip(map(names.setdefault, value, value), inner, strict=True))
            self._left -= _sizes(value.values(), kinds)
            if new := len(names) - before:
                self._left -= new * _ENTRY_BYTES + sum(map(sys.getsizeof, itertools.islice(reversed(names), new)))
        elif type(value) is list:
            kinds = set(map(type, value))
            value = list(map(self._shared, value)) if kinds & _CONTAINERS else value
            self._left -= _sizes(value, kinds)
        return value


def _sizes(values: Collection[Any], kinds: set[type]) -> int:
    """Return the bytes of memory of values of some types, without what is inside them."""
    if kinds == {float}:
        return len(values) * sys.getsizeof(0.5)
    return sum(map(sys.getsizeof, values))
