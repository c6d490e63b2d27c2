"""Carry the files of a checkpoint between nodes that do not share its directory, through the processes of the run.

The directory of the main process holds the complete checkpoint. A save copies the files that other ranks wrote on their own
nodes, such as the states of their random generators, into it. A load sends its files to the nodes that do not have them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.durable import make_directory
from distributed.checkpoints.manifest import MANIFEST

RECEIVED = "received"  # directory beside the checkpoints for the last checkpoint that was delivered to this node
_LOADING = ".loading"  # directory beside the checkpoints for one that is being loaded
_CHUNK_BYTES = 64 << 20
_APPEARS_S = 0.5  # time that a new file may take to appear on a node that shares the directory, such as over NFS
_MARKER = ".main-"  # prefix of the file by which the ranks find out whether they share the directory


class Copies:
    """Exchange files between the nodes of a run. Every rank must call each of the methods, unless it says otherwise.

    Args:
        directory: the directory of the checkpoints, on each node.
        agreement: the agreement of all ranks.
    """

    def __init__(self, directory: Path, agreement: Agreement) -> None:
        self._directory, self._agreement, self._context = directory, agreement, agreement.context
        # For each rank the first rank that sees the same directory, or None before the ranks have looked. The number of nodes does
        # not tell: nodes may share a directory, and workers that were started by hand do not know how many there are on each node.
        self._seen_by: list[int] | None = None
        self._marker = ""  # name of the main process's file

    def away(self) -> list[int]:
        """Return the ranks that do not see the directory of the main process."""
        if self._seen_by is None:
            self._seen_by = self._look()
        return [rank for rank, first in enumerate(self._seen_by) if first > 0]

    def away_from(self, path: Path) -> list[int]:
        """Return the ranks that do not see the checkpoint that the main process has at `path`, none if it has none there."""
        if path.parent == self._directory:
            return self.away()
        away = self._where(not _appears(path / MANIFEST, 0.0))
        if 0 in away:
            return []
        if away and self._seen_by is None:  # the checkpoint is copied into the directories of these ranks
            self._seen_by = self._look()
        return away

    def clear(self, stage: Path) -> None:
        """Remove `stage` in the directory of this rank, if the rank is away. Not a collective. Call `away` first."""
        if self._seen_by is not None and self._is_first_of(self.away()):
            shutil.rmtree(stage, ignore_errors=True)

    def close(self) -> None:
        """Remove the marker file of the main process. Not a collective. Do not save after this call if a rank is away."""
        if self._marker and self._context.is_main_process:
            with contextlib.suppress(OSError):
                (self._directory / self._marker).unlink()

    def gather(self, stage: Path) -> None:
        """Send what the nodes that are away wrote into `stage` to the `stage` of the main process."""
        if not self.away():
            return
        late = self._ranks_without(self._directory / self._marker, 0.0)  # a file system may have shown the marker late
        self._seen_by = [first if rank in late else 0 for rank, first in enumerate(self._seen_by or [])]
        copy = stage if self._context.is_main_process else None
        for source in self._first_ranks_of(self.away()):
            self._send(stage, copy, source)

    @contextlib.contextmanager
    def here(self, path: Path) -> Iterator[Path]:
        """Yield the path under which this rank reads the checkpoint that the main process has at `path`."""
        away = self.away_from(path)
        copy = self._directory / _LOADING
        try:
            yield self._send_to(away, path, copy / path.name)
        finally:
            if self._is_first_of(away):  # the checkpoint is loaded, so the copy is not needed any more
                shutil.rmtree(copy, ignore_errors=True)

    def deliver(self, path: Path) -> Path:
        """Send the checkpoint `path` of the main process to the nodes that are away. Return the path at which this rank sees it.

        A node keeps only the checkpoint that was delivered last.
        """
        return self._send_to(self.away(), path, self._directory / RECEIVED / path.name)

    def _is_first_of(self, away: list[int]) -> bool:
        """Return whether this rank is away and is the one that reads and writes the files of its directory."""
        return self._context.rank in self._first_ranks_of(away)

    def _first_ranks_of(self, away: list[int]) -> list[int]:
        """Return the first of those ranks of `away` that see the same directory, for each directory."""
        seen_by = self._seen_by or []
        return sorted({seen_by[rank]: rank for rank in reversed(away)}.values())

    def _where(self, holds: bool) -> list[int]:
        """Return the ranks on which `holds` is true."""
        ranks = dict.fromkeys(map(str, range(self._context.world_size)), 0.0)
        ranks[str(self._context.rank)] = float(holds)
        return [int(rank) for rank, found in self._agreement.world.reduce(ranks).items() if found]

    def _send_to(self, away: list[int], path: Path, copy: Path) -> Path:
        """Send the files in `path` of the main process to `copy` on the nodes of `away`. Return where this rank has them."""
        if not away:
            return path
        is_first = self._is_first_of(away)
        if is_first:
            shutil.rmtree(copy.parent, ignore_errors=True)
        self._send(path, copy if is_first else None, 0)
        return copy if self._context.rank in away else path

    def _send(self, path: Path, copy: Path | None, source: int) -> None:
        """Send the files in `path` of the rank `source` to the ranks that have a `copy`."""
        sizes: dict[str, int] = self._broadcast(lambda: _sizes(path), source)
        for chunk in _chunks(sizes):
            data = self._broadcast(lambda: [_part(path / name, *part) for name, *part in chunk], source)  # noqa: B023
            self._agreement.on_all(lambda: None if copy is None else _add_all(copy, chunk, data))  # noqa: B023

    def _broadcast(self, read: Callable[[], Any], source: int) -> Any:
        """Return on all ranks what `read` returns on the rank `source`. All ranks raise its error."""
        is_source = self._context.rank == source
        mine = self._agreement.on_all(lambda: read() if is_source else None)
        return self._agreement.world.broadcast(mine, source)

    def _look(self) -> list[int]:
        """Let the main process create a file, and return for each rank the first rank that sees the same directory."""
        if self._context.world_size == 1:
            return [0]
        self._marker = self._agreement.on_main(lambda: _create(self._directory, f"{_MARKER}{secrets.token_hex(8)}"))
        away = self._ranks_without(self._directory / self._marker, _APPEARS_S)
        if not away:
            self.close()
            return [0] * self._context.world_size
        return self._first_that_see_the_same(away)

    def _first_that_see_the_same(self, away: list[int]) -> list[int]:
        """Let each rank of `away` create a file too. Return for each rank the first rank whose file it sees."""
        own, is_away = self._context.rank, self._context.rank in away
        names = {rank: f"{self._marker}-{rank}" for rank in away}

        def first_here() -> int:
            here = {file.name for file in self._directory.iterdir()}
            return min(rank for rank, name in names.items() if name in here)

        try:
            self._agreement.on_all(lambda: _create(self._directory, names[own], f"-{own}") if is_away else None)
            seen_by: list[int] = self._agreement.world.gather(
                self._agreement.on_all(lambda: first_here() if is_away else 0)
            )
        finally:
            if is_away:
                with contextlib.suppress(OSError):
                    (self._directory / names[own]).unlink()
        return seen_by

    def _ranks_without(self, file: Path, seconds: float) -> list[int]:
        """Return the ranks that do not see a file of the main process within `seconds`."""
        return [rank for rank in self._where(not _appears(file, seconds)) if rank > 0]


def _create(directory: Path, name: str, end: str = "") -> str:
    """Remove the marker files of earlier attempts that end with `end`, create the marker file `name`, and return its name."""
    make_directory(directory)
    for old in directory.glob(f"{_MARKER}*{end}"):
        old.unlink(missing_ok=True)
    (directory / name).touch()
    return name


def _appears(path: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not os.access(path, os.F_OK):  # unlike Path.exists, it raises nothing
        if time.monotonic() > deadline:
            return False
        with contextlib.suppress(OSError):
            list(path.parent.iterdir())  # NFS then asks its server again
        time.sleep(0.05)
    return True


def _sizes(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}


def _chunks(sizes: Mapping[str, int]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield the parts of files that are sent together, of at most `_CHUNK_BYTES` bytes: (name, first byte, bytes)."""
    chunk: list[tuple[str, int, int]] = []
    left = _CHUNK_BYTES
    for name, size in sizes.items():
        start = 0
        while start < size or not start:
            if not left:
                yield chunk
                chunk, left = [], _CHUNK_BYTES
            count = min(left, size - start)
            chunk.append((name, start, count))
            start, left = start + max(count, 1), left - count
    if chunk:
        yield chunk


def _part(path: Path, start: int, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(count)


def _add_all(directory: Path, chunk: Sequence[tuple[str, int, int]], data: Sequence[bytes]) -> None:
    for (name, start, _), part in zip(chunk, data, strict=True):
        _add(directory / name, part, start)


def _add(path: Path, data: bytes, start: int) -> None:
    """Write the part of a file that begins at byte `start`. Raises FileExistsError if the file was there before the first part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab" if start else "xb") as file:
        file.write(data)
