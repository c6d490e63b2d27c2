"""A queue of entries to log, in a file, so that no entry is lost if the process is killed before it was delivered."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Spool:
    """A file with one entry to log per line, oldest first. Entries are only appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def open(self) -> list[dict[str, Any]]:
        """Open the file, remove an incomplete last line that a killed writer left, and return the entries.

        Raises OSError if the file cannot be written.
        """
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        read = list(self.read(0))
        os.ftruncate(self._fd, read[-1][1] if read else 0)
        return [entry for entry, _ in read]

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append one line as a whole, or nothing. Raises OSError if the disk is full."""
        assert self._fd is not None
        line = (json.dumps(entry) + "\n").encode()
        before = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise

    def read(self, start: int, limit: int = 1 << 62) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the entries of at most `limit` whole lines from byte `start` on, each with the byte at which its line ends."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(start)
            for _ in range(limit):
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                with contextlib.suppress(ValueError):
                    yield json.loads(line), start

    @property
    def size(self) -> int:
        """The number of bytes written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def close(self) -> None:
        """Close the file. Nothing can be appended afterwards."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def last_steps(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Return the last step of each metric that was logged."""
    steps: dict[str, int] = {}
    for entry in entries:
        if entry["kind"] == "metrics":
            for name in entry["values"]:
                steps[name] = max(steps.get(name, -1), entry["step"])
    return steps
