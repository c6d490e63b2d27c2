"""Compare the contents of a checkpoint's files with the digests in its manifest, before a load and while it reads them."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from distributed.checkpoints import digests
from distributed.checkpoints.digests import FileRecord, file_digest, opened, stream_digest
from distributed.checkpoints.manifest import Manifest, damaged, inspect
from distributed.checkpoints.part_checks import FilePart, PartChecks
from distributed.checkpoints.reading import run_in_threads
from distributed.checkpoints.tensor_file import check_header
from distributed.errors import DamagedError

_PIECE = re.compile(
    r"-(\d{5})-of-(\d{5})\."
)  # the number of a rank, from 1, and the number of ranks, in the name of a file


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest.

    Detects accidental damage (a torn write, a flipped bit, a lost file) but not forged digests. Forged files cannot run
    code either, because the loaders only parse tensors and JSON. Raises CheckpointError with the first bad file and the
    reason.
    """
    manifest = inspect(path)
    verify_files(path, manifest.files)
    return manifest


def verify_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Read every byte of some files of a checkpoint. Raises CheckpointError with the first bad file and the reason."""
    stop = threading.Event()
    run_in_threads([functools.partial(_verify_file, path, name, record, stop) for name, record in files.items()], stop)


def verify_small_parts(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Read some files of a checkpoint, without the parts that `large_parts` returns. Raises CheckpointError as `verify_files` does."""
    stop = threading.Event()
    run_in_threads([functools.partial(_verify_small, path, name, record, stop) for name, record in files.items()], stop)


def large_parts(path: Path, files: Mapping[str, FileRecord]) -> Iterator[FilePart]:
    """Yield the parts of files that a load may verify itself while it reads them, such as large tensors.

    The first part of a file is never one of them, because it has the header, which must be right before anything is read.
    """
    for name, record in files.items():
        yield from (part for part, is_large in _parts(path, name, record) if is_large)


def verify_unread(path: Path, checks: PartChecks, names: Iterable[str]) -> None:
    """Read the large parts of the files `names` that the load has not read.

    Raises DamagedError with the first bad file, also if the load read the bad part.
    """
    if bad := checks.damaged:
        raise _differs(path, str(bad[0].file.relative_to(path)))
    unread: dict[Path, list[FilePart]] = {}
    for part in checks.unread:
        unread.setdefault(part.file, []).append(part)
    stop = threading.Event()  # a file without unread parts is opened too, because it may be lost
    run_in_threads(
        [functools.partial(_verify_parts, path, name, unread.get(path / name, []), stop) for name in names], stop
    )


def part_to_verify(
    files: Mapping[str, FileRecord], readers: Sequence[int], rank: int, world_size: int
) -> dict[str, FileRecord]:
    """Return the files that `rank` verifies if the ranks `readers` verify a checkpoint together.

    Each file has one reader. A piece that rank i of `world_size` ranks has saved is verified by rank i, which also loads it. Other
    files go to the rank with the fewest bytes, the largest file first.
    """
    if rank not in readers:
        return {}
    loads, mine = dict.fromkeys(readers, 0), {}
    for name, record in sorted(files.items(), key=lambda item: (not _PIECE.search(item[0]), -item[1].bytes, item[0])):
        own = saved_by(name, world_size)
        reader = own if own in loads else min(loads, key=lambda each: (loads[each], each))
        loads[reader] += record.bytes
        if reader == rank:
            mine[name] = record
    return mine


def saved_by(name: str, world_size: int) -> int | None:
    """Return the rank that saved a file of pieces, if `world_size` ranks saved the checkpoint. Return None for other files."""
    piece = _PIECE.search(name)
    return int(piece[1]) - 1 if piece and int(piece[2]) == world_size else None


def _parts(path: Path, name: str, record: FileRecord) -> Iterator[tuple[FilePart, bool]]:
    """Yield each part of a file, and whether it may be verified while it is loaded."""
    file, begin = path / name, 0
    for size, digest in record.parts:
        yield FilePart(file, begin, size, digest), size >= digests.LARGE_BYTES and begin > 0
        begin += size


def _verify_file(path: Path, name: str, record: FileRecord, stop: threading.Event) -> None:
    try:
        if name.endswith(".safetensors"):
            check_header(path / name)
        if file_digest(path / name, stop) != record.xxh3_128:
            raise _differs(path, name)
    except OSError as error:
        raise damaged(path, name, f"cannot be read: {error.strerror}") from None


def _verify_small(path: Path, name: str, record: FileRecord, stop: threading.Event) -> None:
    """Verify the parts of a file that are not large, or all of it if it has no parts."""
    if record.parts:
        _verify_parts(path, name, [part for part, is_large in _parts(path, name, record) if not is_large], stop)
    else:
        _verify_file(path, name, record, stop)


def _verify_parts(path: Path, name: str, parts: Sequence[FilePart], stop: threading.Event) -> None:
    try:
        with opened(path / name) as file:
            for part in parts:
                file.seek(part.begin)
                if stream_digest(file, stop, part.size) != part.digest:
                    raise _differs(path, name)
    except OSError as error:
        raise damaged(path, name, f"cannot be read: {error.strerror}") from None


def _differs(path: Path, name: str) -> DamagedError:
    return damaged(path, name, "does not have the content that was saved (digest differs)")
