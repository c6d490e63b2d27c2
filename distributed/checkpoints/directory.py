"""A directory of checkpoints on disk: staging, renaming, finding, setting aside, pruning. Main process only."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from distributed.checkpoints.durable import sync
from distributed.checkpoints.manifest import (
    CheckpointInfo,
    Manifest,
    NewerFormatError,
    best_of,
    list_checkpoints,
    resolve,
    verify,
)
from distributed.errors import CheckpointError

_STAGE, _OLD, _TRASH, _DAMAGED = ".tmp-", ".old-", ".trash-", "damaged-"


def stage_of(target: Path) -> Path:
    """Where the checkpoint `target` is built, beside it."""
    return target.with_name(_STAGE + target.name)


class CheckpointDirectory:
    """The checkpoints under `path` and every change to them. A crash at any moment leaves all that were committed.

    `warn` gets one line for what went wrong and does not matter much.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn = path, warn
        self._is_tidy = False

    def begin(self, target: Path) -> None:
        """Make an empty stage for `target`."""
        self._tidy()
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync(self.path.parent)
        stage = stage_of(target)
        if stage.exists():
            shutil.rmtree(stage)
        stage.mkdir()

    def next_sequence(self) -> int:
        """The number of the save that comes next."""
        return 1 + max((manifest.sequence for manifest in self._manifests()), default=0)

    def put_in_place(self, target: Path) -> None:
        """Rename the finished stage. A directory cannot replace another in one step, so an old one of the same
        step stands aside under a name from which `_tidy` would bring it back."""
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
        sync(self.path)
        if old.exists():
            _discard(old)

    def prune(self, keep_latest_k: int, keep_best: bool) -> None:
        """Keep the newest `keep_latest_k` and the best. Sound by manifest and sizes is enough here: the newest was
        digested a moment ago. Damaged ones do not count and are left for `newest_verified` to set aside."""
        try:
            infos = [info for info in list_checkpoints(self.path) if not info.problem]
            kept = infos[-keep_latest_k:]
            best = best_of(infos)
            if keep_best and best is not None:
                kept = [*kept, best]
            for info in infos:
                if info not in kept:
                    _discard(info.path)
        except OSError as error:
            self._warn(f"old checkpoints in {self.path} could not be removed: {error.strerror}")

    def newest_verified(self) -> str | None:
        """The name of the newest checkpoint that verifies; None where there is none and never was one.

        Damaged ones in its way are set aside, each with one warning. CheckpointError where only damaged ones are left.
        """
        try:
            self._tidy()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}") from None
        for info in reversed(list_checkpoints(self.path)):
            try:
                verify(info.path)
                return info.path.name
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._set_aside(info, str(error))
        if damaged := sorted(self.path.glob(f"{_DAMAGED}step-*")):
            raise CheckpointError(
                f"{self.path} holds only damaged checkpoints ({', '.join(path.name for path in damaged[-3:])}):"
                " copy a sound one there, or begin anew with another --run-dir or --checkpoint-dir"
            )
        return None

    def bytes_needed(self, target: Path) -> int:
        """The larger of the newest checkpoint and what the failed save had begun; files get their length first."""
        manifests = self._manifests()
        needed = manifests[-1].total_bytes if manifests else 0
        with contextlib.suppress(OSError):
            needed = max(needed, sum(path.lstat().st_size for path in stage_of(target).rglob("*") if path.is_file()))
        return needed

    def bytes_free(self) -> int:
        """Of the disk under the directory."""
        for parent in (self.path, *self.path.parents):
            with contextlib.suppress(OSError):
                return shutil.disk_usage(parent).free
        return 0

    def _manifests(self) -> list[Manifest]:
        return [info.manifest for info in list_checkpoints(self.path) if info.manifest is not None]

    def _set_aside(self, info: CheckpointInfo, reason: str) -> None:
        aside = _free_name(info.path.with_name(_DAMAGED + info.path.name))
        try:
            info.path.rename(aside)
            where = f"set aside as {aside.name}"
        except OSError as error:
            where = f"left where it is ({error.strerror})"
        self._warn(f"{reason}; step {info.step} is {where}, an older checkpoint is used if there is one")

    def _tidy(self) -> None:
        """Once a process: remove what a killed save left, and bring back a checkpoint that was being replaced."""
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


def open_verified(path: Path) -> Path:
    """The absolute path of the checkpoint that `path` means (see `resolve`), every byte of it compared.

    CheckpointError where it is missing or damaged, with a sound one beside it if there is one.
    """
    checkpoint = resolve(path).absolute()
    try:
        verify(checkpoint)
    except NewerFormatError:
        raise
    except CheckpointError as error:
        others = [info for info in list_checkpoints(checkpoint.parent) if info.path != checkpoint and not info.problem]
        hint = (
            f"another one is sound by its sizes: {others[-1].path}" if others else "there is no other in its directory"
        )
        raise CheckpointError(f"{error}; {hint}") from None
    return checkpoint


def _discard(path: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen as one."""
    trash = _free_name(path.with_name(_TRASH + path.name.removeprefix(_OLD)))
    path.rename(trash)
    shutil.rmtree(trash)


def _free_name(path: Path) -> Path:
    names = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, sys.maxsize))
    return next(name for name in names if not name.exists())
