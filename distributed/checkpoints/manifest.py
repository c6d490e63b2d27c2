"""What a checkpoint directory holds, and whether it still does. Needs no backend and no framework."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from distributed.checkpoints.tensor_file import check_header
from distributed.errors import CheckpointError

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
_MAX_MANIFEST_BYTES = 8 << 20
_BLOCK_BYTES = 4 << 20
_NAME = re.compile(r"step-(\d{8,})")
_SEAL = b',\n "xxh3_128": "'


class NewerFormatError(CheckpointError):
    """A checkpoint of a later version of this package: sound, but not ours to read."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its size and the digest of its content."""

    bytes: int
    xxh3_128: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents. Written last: a directory without one is not a checkpoint."""

    step: int
    epoch: int
    samples_seen: int
    samples_in_epoch: int  # the data cursor: global samples of the running epoch already used
    backend: str
    world_size: int
    sequence: int  # counts the saves of a directory; the newest has the highest, also after a resume from an older step
    created: str  # UTC, ISO 8601
    monitor: str
    monitor_mode: str
    monitor_value: float | None
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]

    @property
    def total_bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(record.bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """The file's content. Its last line is a digest of every byte before it, so the manifest guards itself too."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        body = json.dumps(content, indent=1)[:-2].encode()
        return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """One entry of a directory of checkpoints. Contents are not read: `verify` does that."""

    path: Path
    step: int
    manifest: Manifest | None  # None: the manifest is missing or damaged
    problem: str = ""  # why the files do not match the manifest, as far as names and sizes tell
    is_best: bool = False

    @property
    def sort_key(self) -> tuple[int, int]:
        """Oldest first. Without a manifest the age is unknown: last, so that a lost newest one is noticed."""
        return (self.manifest.sequence if self.manifest else sys.maxsize, self.step)


def step_name(step: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:08d}"


def file_digest(path: Path) -> str:
    """xxh3_128 of a file in hex, read in blocks. It notices accidents; it is no protection against forgery."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint and return its manifest. CheckpointError names the first bad file and why.

    Guards against accidents (a torn write, a flipped bit, a lost file), not against somebody who forges digests:
    against those the loaders only ever parse tensors and JSON.
    """
    manifest = inspect(path)
    for name, record in manifest.files.items():
        try:
            if name.endswith(".safetensors"):
                check_header(path / name)
            if file_digest(path / name) != record.xxh3_128:
                raise _damaged(path, name, "does not have the content that was saved (digest differs)")
        except OSError as error:
            raise _damaged(path, name, f"cannot be read: {error.strerror}") from None
    return manifest


def inspect(path: Path) -> Manifest:
    """The manifest, with names, kinds and sizes of all files compared but no content read. CheckpointError if wrong."""
    manifest = read_manifest(path)
    try:
        found = dict(_walk(path))
    except OSError as error:
        raise _damaged(path, error.filename or "", f"cannot be read: {error.strerror}") from None
    for name, record in manifest.files.items():
        if name not in found:
            raise _damaged(path, name, "is missing")
        if found[name] != record.bytes:
            raise _damaged(path, name, f"has {found[name]} bytes, {record.bytes} were saved")
    for name in found:
        if name not in manifest.files and name != MANIFEST and not name.rpartition("/")[2].startswith("."):
            raise _damaged(path, name, "is not in the manifest")
    if STATE not in manifest.files:
        raise _damaged(path, STATE, "is missing")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint `path`, checked by its own digest. CheckpointError if missing or damaged."""
    raw = read_small(path, MANIFEST, _MAX_MANIFEST_BYTES)
    body, seal, tail = raw.rpartition(_SEAL)
    if not seal or tail != xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n':
        raise _damaged(path, MANIFEST, "does not have the content that was saved (digest differs)")
    content = parse_json(path, MANIFEST, raw)
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise _damaged(path, MANIFEST, "is not a manifest")
    if content["format"] > FORMAT:
        found = content["format"]
        raise NewerFormatError(f"checkpoint {path} has format {found}, this version reads {FORMAT}: upgrade")
    return _manifest(path, content)


def read_small(path: Path, name: str, limit: int) -> bytes:
    """The content of a checkpoint's file `name`. CheckpointError if missing, not regular, or over `limit` bytes."""
    try:
        fd = os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _damaged(path, name, "is not a regular file")
            if status.st_size > limit:
                raise _damaged(path, name, f"has {status.st_size} bytes, {limit} are allowed")
            return file.read(limit)
    except FileNotFoundError:
        raise _damaged(path, name, "is missing") from None
    except OSError as error:
        raise _damaged(path, name, f"cannot be read: {error.strerror}") from None


def parse_json(path: Path, name: str, raw: bytes) -> Any:
    """`raw` as JSON. CheckpointError naming the checkpoint's file where it is none, or nested without end."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, name, f"is not JSON: {error}") from None


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Every `step-...` of a directory, oldest first, by manifest and sizes; empty where there is no such directory."""
    try:
        entries = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    infos = sorted((_info(entry) for entry in entries), key=lambda info: info.sort_key)
    best = best_of(infos)
    return [dataclasses.replace(info, is_best=info is best) for info in infos]


def best_of(infos: list[CheckpointInfo]) -> CheckpointInfo | None:
    """The sound checkpoint with the best monitor, the earliest of equals; None where none has a value.

    What the newest one monitors decides, so values of another metric in an old checkpoint do not compete.
    """
    sound = [(info, info.manifest) for info in infos if info.manifest is not None and not info.problem]
    if not sound:
        return None
    newest = sound[-1][1]
    sign = -1.0 if newest.monitor_mode == "max" else 1.0
    rivals = [
        (sign * manifest.monitor_value, info.sort_key, info)
        for info, manifest in sound
        if (manifest.monitor, manifest.monitor_mode) == (newest.monitor, newest.monitor_mode)
        and manifest.monitor_value is not None
        and math.isfinite(manifest.monitor_value)
    ]
    return min(rivals, key=lambda rival: rival[:2])[2] if rivals else None


def resolve(path: Path) -> Path:
    """The checkpoint meant by a checkpoint, a directory of them, or a run directory (there: the newest, not verified).

    CheckpointError where there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"no checkpoint at {path}: give a run directory or one of its checkpoints/step-...")
    if (path / MANIFEST).exists() or _NAME.search(path.name):
        return path
    infos = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not infos:
        raise CheckpointError(f"{path} holds no checkpoint: give a run directory, or a directory of step-... ones")
    return infos[-1].path


def check_source(source: str) -> None:
    """CheckpointError unless `resume_from_checkpoint=source` names a checkpoint that is sound by names and sizes."""
    try:
        inspect(resolve(Path(source)))
    except CheckpointError as error:
        raise CheckpointError(f"resume_from_checkpoint={source!r}: {error}") from None


def _info(path: Path) -> CheckpointInfo:
    match = _NAME.fullmatch(path.name)
    step = int(match.group(1)) if match else 0
    try:
        return CheckpointInfo(path, step, inspect(path))
    except CheckpointError as error:
        problem = str(error)
    try:
        return CheckpointInfo(path, step, read_manifest(path), problem)
    except CheckpointError:
        return CheckpointInfo(path, step, None, problem)


def _walk(path: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(relative name, bytes) of every file. Links and devices are refused: a checkpoint's files are its own."""
    with os.scandir(path / prefix) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(path, f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            else:
                raise _damaged(path, name, "is a link or a device, not a regular file")


def _manifest(path: Path, content: dict[str, Any]) -> Manifest:
    """A Manifest out of parsed JSON, every field's type checked: the values may come from anybody."""
    files = content.get("files")
    if not isinstance(files, dict):
        raise _damaged(path, MANIFEST, "names no files")
    records: dict[str, FileRecord] = {}
    for name, record in files.items():
        _check_name(path, name)
        try:
            records[name] = FileRecord(int(record["bytes"]), str(record["xxh3_128"]))
        except (TypeError, KeyError, ValueError):
            raise _damaged(path, MANIFEST, f"has a wrong entry for {name!r}") from None
    known = {field.name: field.type for field in dataclasses.fields(Manifest) if field.name != "files"}
    for name, kind in known.items():
        if name not in content or not isinstance(content[name], _KINDS[str(kind)]):
            raise _damaged(path, MANIFEST, f"lacks {name} or has a wrong value for it")
    return Manifest(**{name: content[name] for name in known}, files=records)


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "str": (str,), "float | None": (float, int, type(None)),
    "Mapping[str, Any]": (dict,), "Mapping[str, str]": (dict,),
}  # fmt: skip


def _check_name(path: Path, name: str) -> None:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise _damaged(path, MANIFEST, f"names the file {name!r}, which may lie outside the checkpoint")


def _damaged(path: Path, name: str, reason: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path}: {name} {reason}")
