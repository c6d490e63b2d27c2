"""The manifest of a checkpoint directory, and checks of names and sizes against it. Needs no backend and no framework."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from distributed.checkpoints import digests
from distributed.checkpoints.digests import FileRecord, num_parts
from distributed.config.addresses import check_library, is_address
from distributed.config.kinds import COUNT, NUMBER, OBJECT, TEXT, check_kinds, object_of, optional
from distributed.config.reading import MAX_DEPTH, MAX_MANIFEST_BYTES, LimitError, parse_json, read_bytes
from distributed.errors import CheckpointError, DamagedError

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
_LONGEST_NAME = 1000
_NAME = re.compile(r"step-(\d{8,})")
_SEAL = b',\n "xxh3_128": "'


class NewerFormatError(CheckpointError):
    """Raised for a checkpoint that a later version of this package wrote and this version cannot read."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Table of contents of a checkpoint. It is written last, so a directory without a manifest is not a checkpoint."""

    step: int
    epoch: int
    samples_seen: int
    samples_in_epoch: int  # number of global samples of the current epoch that were used
    backend: str
    world_size: int
    sequence: int  # number of the save in its directory; a later save has a higher one, even at an earlier step
    created: str  # UTC, ISO 8601
    monitor: str
    monitor_mode: str
    monitor_value: float | None
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    # Number ("tensors") and size ("bytes") of the frozen parameters that are left out, and a digest of them; None if the
    # checkpoint is whole.
    frozen: Mapping[str, Any] | None = None

    @property
    def is_trainable_only(self) -> bool:
        """True if frozen parameters are left out."""
        return self.frozen is not None

    @property
    def total_bytes(self) -> int:
        """Size in bytes of all files except the manifest."""
        return sum(record.bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json.

        Its last line is a digest of all bytes before it, which protects the manifest itself.
        """
        with_parts = num_parts(self.files.values()) <= digests.MAX_PARTS
        files = {name: record.to_json(with_parts=with_parts) for name, record in self.files.items()}
        content = {"format": FORMAT, **dataclasses.asdict(dataclasses.replace(self, files={})), "files": files}
        if self.frozen is None:
            del content["frozen"]
        body = json.dumps(content, indent=1)[:-2].encode()
        return body + _SEAL + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """One entry of a directory of checkpoints. File contents are not read; `verify` reads them."""

    path: Path
    step: int
    manifest: Manifest | None  # None if the manifest is missing or damaged
    problem: str = ""  # why names or sizes of the files do not match the manifest; "" if they do
    is_best: bool = False

    @property
    def sort_key(self) -> tuple[int, int]:
        """Key that sorts the oldest checkpoint first.

        Without a manifest the age is unknown. Such a checkpoint sorts last, so that a damaged newest one is detected.
        """
        return (self.manifest.sequence if self.manifest else sys.maxsize, self.step)


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def inspect(path: Path) -> Manifest:
    """Return the manifest after comparing names, types and sizes of all files, without reading their contents.

    Raises CheckpointError if something does not match.
    """
    manifest = read_manifest(path)
    try:
        found = dict(_walk(path))
    except OSError as error:
        raise damaged(path, error.filename or "", f"cannot be read: {error.strerror}") from None
    for name, record in manifest.files.items():
        if name not in found:
            raise damaged(path, name, "is missing")
        if found[name] != record.bytes:
            raise damaged(path, name, f"has {found[name]} bytes, {record.bytes} were saved")
    for name in found:
        if name not in manifest.files and name != MANIFEST and not name.rpartition("/")[2].startswith("."):
            raise damaged(path, name, "is not in the manifest")
    if STATE not in manifest.files:
        raise damaged(path, STATE, "is missing")
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint `path` after checking its own digest.

    Raises CheckpointError if it is missing or damaged.
    """
    return manifest_of(path, read_small(path, MANIFEST, MAX_MANIFEST_BYTES))


def manifest_of(path: Path | str, raw: bytes) -> Manifest:
    """Return the manifest in `raw` after checking its own digest. `path` is the checkpoint, for messages.

    Raises CheckpointError if it is damaged.
    """
    body, seal, tail = raw.rpartition(_SEAL)
    if not seal or tail != xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n':
        raise damaged(path, MANIFEST, "does not have the content that was saved (digest differs)")
    content = parsed(path, MANIFEST, raw)
    if not isinstance(content, dict) or not COUNT.holds(content.get("format")):
        raise damaged(path, MANIFEST, "is not a manifest")
    if content["format"] > FORMAT:
        found = content["format"]
        raise NewerFormatError(f"checkpoint {path} has format {found}, this version reads {FORMAT}: upgrade")
    return _manifest(path, content)


def read_small(path: Path, name: str, limit: int) -> bytes:
    """Return the content of the file `name` of a checkpoint.

    Raises CheckpointError if it is missing, not a regular file, or larger than `limit` bytes.
    """
    try:
        return read_bytes(path / name, limit, os.O_NOFOLLOW)
    except FileNotFoundError:
        raise damaged(path, name, "is missing") from None
    except LimitError as error:
        raise damaged(path, name, str(error)) from None
    except OSError as error:
        raise damaged(path, name, f"cannot be read: {error.strerror}") from None


def parsed(path: Path | str, name: str, raw: bytes) -> Any:
    """Return the JSON in `raw`, the content of the file `name` of a checkpoint.

    Raises CheckpointError with that name if it is not JSON or beyond a limit.
    """
    try:
        return parse_json(raw)
    except LimitError as error:
        raise damaged(path, name, str(error)) from None
    except ValueError as error:
        raise damaged(path, name, f"is not JSON: {error}") from None


def damaged(path: Path | str, name: str, reason: str) -> DamagedError:
    """Return the error for the file `name` of the checkpoint `path`."""
    return DamagedError(f"checkpoint {path}: {name} {reason}")


def summary_of_frozen(record: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Return `Manifest.frozen` for the record of each parameter that a checkpoint leaves out. None if it is whole."""
    if not record:
        return None
    digest = xxhash.xxh3_128()
    for name in sorted(record):
        digest.update(f"{name} {record[name]['xxh3_128']}\n".encode())
    size = sum(int(entry["bytes"]) for entry in record.values())
    return {"tensors": len(record), "bytes": size, "xxh3_128": digest.hexdigest()}


def list_checkpoints(directory: Path) -> list[CheckpointInfo]:
    """Return all `step-...` entries of a directory, oldest first, checked by manifest and sizes.

    Returns an empty list if the directory does not exist.
    """
    try:
        entries = [entry for entry in directory.iterdir() if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    infos = sorted((_info(entry) for entry in entries), key=lambda info: info.sort_key)
    best = best_of(infos)
    return [dataclasses.replace(info, is_best=info is best) for info in infos]


def best_of(infos: list[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the sound checkpoint with the best monitor value, or None if none has a value. Ties go to the earliest.

    Only checkpoints with the `monitor` and `monitor_mode` of the newest one compete.
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
    """Return the checkpoint that `path` means.

    Args:
        path: a checkpoint, a directory of checkpoints, or a run directory. For a directory the newest checkpoint is
            returned, without verifying it.

    Raises:
        CheckpointError: there is no checkpoint.
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
    """Raise CheckpointError unless `source`, the value of `resume_from_checkpoint`, is sound by names and sizes.

    If `source` is an address, only its form and the library for it are checked. ConfigError is raised for a wrong form, and
    ResourceError for a missing library.
    """
    if is_address(source):
        check_library("resume_from_checkpoint", source)
        return
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
    """Yield (relative name, bytes) of every file. Raises CheckpointError for links and devices."""
    with os.scandir(path / prefix) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{prefix}{entry.name}"
            if name.count("/") > MAX_DEPTH:
                raise damaged(path, name, f"is more than {MAX_DEPTH} directories deep")
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(path, f"{name}/")
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            else:
                raise damaged(path, name, "is a link or a device, not a regular file")


def _manifest(path: Path | str, content: dict[str, Any]) -> Manifest:
    """Return the Manifest in parsed JSON. Checks the kind of every value, because the file is not trusted."""
    try:
        check_kinds(content, _KINDS)
        records: dict[str, FileRecord] = {}
        for name, record in content["files"].items():
            _check_name(path, name)
            try:
                records[name] = FileRecord.from_json(record)
            except KeyError as error:
                raise ValueError(f"has a wrong entry for {name!r}: lacks {error.args[0]}") from None
            except ValueError as error:
                raise ValueError(f"has a wrong entry for {name!r}: {error}") from None
        if (count := num_parts(records.values())) > digests.MAX_PARTS:
            raise ValueError(f"has {count} parts of files, {digests.MAX_PARTS} are allowed")
        return Manifest(
            **{name: content[name] for name in _KINDS if name not in _FROM_ELSEWHERE},
            files=records,
            frozen=content.get("frozen"),
        )
    except KeyError as error:
        raise damaged(path, MANIFEST, f"lacks {error.args[0]}") from None
    except ValueError as error:
        raise damaged(path, MANIFEST, str(error)) from None


_FROM_ELSEWHERE = ("files", "frozen")
_KINDS = {
    "step": COUNT, "epoch": COUNT, "samples_seen": COUNT, "samples_in_epoch": COUNT, "backend": TEXT, "world_size": COUNT,
    "sequence": COUNT, "created": TEXT, "monitor": TEXT, "monitor_mode": TEXT, "monitor_value": optional(NUMBER),
    "config": OBJECT, "versions": object_of(TEXT), "files": OBJECT, "frozen": optional(OBJECT),
}  # fmt: skip


def _check_name(path: Path | str, name: str) -> None:
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise damaged(path, MANIFEST, f"names the file {name[:80]!r}, which has control characters or is too long")
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in name or "\0" in name:
        raise damaged(path, MANIFEST, f"names the file {name!r}, which may lie outside the checkpoint")
