"""Change a directory of checkpoints on disk: stage, seal, rename, find, set aside and prune. Main process only."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from distributed.checkpoints.digests import FileRecord, file_digest
from distributed.checkpoints.durable import make_directory, sync, write_file
from distributed.checkpoints.manifest import (
    MANIFEST,
    CheckpointInfo,
    Manifest,
    NewerFormatError,
    best_of,
    inspect,
    list_checkpoints,
    resolve,
)
from distributed.checkpoints.verifying import verify
from distributed.errors import CheckpointError

_STAGE, _OLD, _TRASH, _DAMAGED = ".tmp-", ".old-", ".trash-", "damaged-"


def stage_of(target: Path) -> Path:
    """Return the temporary directory, beside `target`, in which the checkpoint `target` is built."""
    return target.with_name(_STAGE + target.name)


class CheckpointDirectory:
    """Change the checkpoints under `path`. A crash at any moment leaves all committed checkpoints intact.

    Args:
        path: the directory of the checkpoints. It need not exist.
        warn: called with one line of text for each problem that does not stop the run.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = path, warn
        self._is_tidy = False
        self._newest = ""  # name of the checkpoint that was saved or found last

    def begin(self, target: Path) -> None:
        """Create an empty stage for `target`."""
        self._tidy()
        if self.lost():
            self._newest = ""
        make_directory(self.path)
        stage = stage_of(target)
        if stage.exists():
            shutil.rmtree(stage)
        stage.mkdir()

    def lost(self) -> str:
        """Return the path that somebody has deleted: the directory, or the newest checkpoint. Return "" if both are there."""
        if not self._newest or (self.path / self._newest).exists():
            return ""
        return str(self.path / self._newest if self.path.is_dir() else self.path)

    def next_sequence(self) -> int:
        """Return the sequence number of the next save."""
        return 1 + max((manifest.sequence for manifest in self._manifests()), default=0)

    def seal(self, target: Path, manifest: Manifest, known: Mapping[str, FileRecord], sequence: int) -> None:
        """Complete the stage of `target`: write a manifest with the records of all files, and sync the directories.

        Args:
            target: the checkpoint.
            manifest: the manifest without the files and the sequence number.
            known: the records of the files that `write_file` wrote, by their names in the stage. Other files are read again.
            sequence: the smallest sequence number that the checkpoint may get.

        Raises OSError if one of the `known` files is not there, because somebody has deleted the stage meanwhile.
        """
        stage = stage_of(target)
        everything = sorted(stage.rglob("*"))
        names = {str(path.relative_to(stage)): path for path in everything if path.is_file()}
        if lost := known.keys() - names.keys():
            raise OSError(errno.ENOENT, f"{stage / min(lost)} was deleted before the checkpoint was complete")
        records = {name: _record_of(path, known.get(name)) for name, path in names.items()}
        number = max(self.next_sequence(), sequence)
        content = dataclasses.replace(manifest, files=records, sequence=number).to_bytes()
        write_file(stage / MANIFEST, [content], len(content))
        for directory in [*(path for path in everything if path.is_dir()), stage]:
            sync(directory)

    def put_in_place(self, target: Path) -> None:
        """Rename the sealed stage to `target`.

        A directory cannot replace another one atomically. An existing checkpoint of the same step is therefore renamed
        first; `_tidy` restores it if a crash comes in between.
        """
        stage, old = stage_of(target), target.with_name(_OLD + target.name)
        if target.exists():
            if old.exists():
                _discard(old)
            target.rename(old)
        try:
            stage.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        self._newest = target.name
        sync(self.path)
        if old.exists():
            _discard(old)

    def prune(self, keep_latest_k: int, keep_best: bool, busy: str = "") -> None:
        """Delete all checkpoints except the newest `keep_latest_k`, the best one if `keep_best` is set, and the one named `busy`.

        Check only the manifests and file sizes, because the newest checkpoint was digested a moment ago. Damaged
        checkpoints do not count and are left for a resume to set aside.
        """
        try:
            infos = [info for info in list_checkpoints(self.path) if not info.problem]
            keep = kept(infos, keep_latest_k, keep_best)
            for info in infos:
                if info not in keep and info.path.name != busy:
                    _discard(info.path)
        except OSError as error:
            self._warn(f"old checkpoints in {self.path} could not be removed: {error.strerror}")

    def newest(self) -> str | None:
        """Return the name of the newest checkpoint whose files have the right names and sizes, or None if there never was one.

        Damaged checkpoints that are newer are set aside, each with one warning. Raises CheckpointError if only damaged
        ones are left.
        """
        try:
            self._tidy()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from None
        for info in reversed(list_checkpoints(self.path)):
            try:
                if info.problem:
                    inspect(info.path)  # raises the error with its type
                self._newest = info.path.name
                return info.path.name
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self.set_aside(info.path, str(error))
        if damaged := sorted(self.path.glob(f"{_DAMAGED}step-*")):
            raise CheckpointError(
                f"{self.path} holds only damaged checkpoints ({', '.join(path.name for path in damaged[-3:])}):"
                " copy an undamaged one there, or start a new run with another --run-dir or --checkpoint-dir"
            )
        return None

    def set_aside(self, path: Path, reason: str) -> str:
        """Rename a damaged checkpoint, and warn. Return "", or why it could not be renamed."""
        aside = _free_name(path.with_name(_DAMAGED + path.name))
        try:
            path.rename(aside)
        except OSError as error:
            return str(error.strerror or error)
        step = int(path.name.removeprefix("step-"))
        self._warn(f"{reason}; step {step} is set aside as {aside.name}, an older checkpoint is used if there is one")
        return ""

    def bytes_needed(self, target: Path) -> int:
        """Return the bytes that a save needs: the size of the newest checkpoint or of the failed save, whichever is
        larger.

        Files get their full length before they are written, so an unfinished file of the failed save counts in full.
        """
        manifests = self._manifests()
        needed = manifests[-1].total_bytes if manifests else 0
        with contextlib.suppress(OSError):
            needed = max(needed, sum(path.lstat().st_size for path in stage_of(target).rglob("*") if path.is_file()))
        return needed

    def bytes_free(self) -> int:
        """Return the free bytes of the disk that holds the directory."""
        for parent in (self.path, *self.path.parents):
            with contextlib.suppress(OSError):
                return shutil.disk_usage(parent).free
        return 0

    def _manifests(self) -> list[Manifest]:
        return [info.manifest for info in list_checkpoints(self.path) if info.manifest is not None]

    def _tidy(self) -> None:
        """Remove what a killed save left and restore a checkpoint that was being replaced. Runs once per process."""
        if self._is_tidy or not self.path.is_dir():
            return
        for path in self.path.iterdir():
            if path.name.startswith((_STAGE + "step-", _TRASH + "step-")):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_OLD + "step-"):
                target = path.with_name(path.name.removeprefix(_OLD))
                if target.exists():
                    _discard(path)
                else:
                    path.rename(target)
        self._is_tidy = True


def kept(infos: list[CheckpointInfo], keep_latest_k: int, keep_best: bool) -> list[CheckpointInfo]:
    """Return the checkpoints of `infos` that retention keeps. `infos` are sound checkpoints, oldest first."""
    best = best_of(infos) if keep_best else None
    return [*infos[-keep_latest_k:], *([best] if best is not None else [])]


def open_verified(path: Path, check: Callable[[Path], object] = verify) -> Path:
    """Check the checkpoint that `path` means (see `resolve`) and return its absolute path.

    By default `check` verifies every byte. Raises CheckpointError if the checkpoint is missing or damaged. The message names a
    sound checkpoint beside it if there is one.
    """
    checkpoint = resolve(path).absolute()
    try:
        check(checkpoint)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {beside(checkpoint)}") from None
    return checkpoint


def beside(checkpoint: Path) -> str:
    """Return text that names the newest sound checkpoint beside a damaged one, or says that there is none."""
    others = [info for info in list_checkpoints(checkpoint.parent) if info.path != checkpoint and not info.problem]
    if not others:
        return "there is no other checkpoint in its directory"
    return f"another checkpoint, whose files have the right sizes, is {others[-1].path}"


def _record_of(path: Path, written: FileRecord | None) -> FileRecord:
    """Return the record of a file. If `write_file` wrote the file, it is synced already and its digest is known."""
    size = path.stat().st_size
    if written is None:
        sync(path)
        return FileRecord(size, file_digest(path))
    if size != written.bytes:
        raise OSError(errno.EIO, f"{path.name} has {size} bytes, {written.bytes} were written")
    return written


def _discard(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted one is never taken for a checkpoint."""
    trash = _free_name(path.with_name(_TRASH + path.name.removeprefix(_OLD)))
    path.rename(trash)
    shutil.rmtree(trash)


def _free_name(path: Path) -> Path:
    names = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, sys.maxsize))
    return next(name for name in names if not name.exists())
