"""CheckpointStore: names, commits, verifies, prunes and finds checkpoints. Knows no framework."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.backends.base import Backend
from distributed.errors import CheckpointError, TrainingError
from distributed.state import TrainState, WorkerContext
from distributed.storage.agreement import Agreement
from distributed.storage.durable import sync, write_file
from distributed.storage.jsonable import decode, encode
from distributed.storage.manifest import (
    MANIFEST,
    STATE,
    CheckpointInfo,
    FileRecord,
    Manifest,
    NewerFormatError,
    best_of,
    file_digest,
    list_checkpoints,
    parse_json,
    read_manifest,
    read_small,
    resolve,
    step_name,
    verify,
)

__all__ = ["CheckpointInfo", "CheckpointStore", "Manifest", "list_checkpoints", "read_state", "resolve", "verify"]

MAX_MISSES = 3  # saves in a row that may fail before training stops
_MAX_STATE_BYTES = 32 << 20
_STAGE, _OLD, _TRASH = ".tmp-", ".old-", ".trash-"


def read_state(path: Path) -> tuple[TrainState, dict[str, Any]]:
    """The framework-free part of a checkpoint and what `Backend.save` returned. CheckpointError where it is neither."""
    content = parse_json(path, STATE, read_small(path, STATE, _MAX_STATE_BYTES))
    try:
        return TrainState.from_json(decode(content["train"])), dict(content["backend"])
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path}: {STATE} is not a training state ({error!r})") from None


class CheckpointStore:
    """The checkpoints of one directory. `save`, `find`, `open` and `load` are collectives: every rank calls them.

    A save is staged beside its target, fsynced, sealed by a manifest with a digest of every file, and only then
    renamed: a crash at any moment leaves the earlier checkpoints as they were. Digests (xxh3_128) notice accidents,
    not forgery. `report` is called on the main process with events (`{"kind": "warning", "message": ...}`).
    """

    def __init__(
        self,
        directory: Path,
        backend: Backend[Any],
        *,
        keep_latest_k: int,
        keep_best: bool,
        monitor: str,
        monitor_mode: str,
        context: WorkerContext,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self.directory, self.backend, self.context, self.report = directory, backend, context, report
        self.keep_latest_k, self.keep_best = keep_latest_k, keep_best
        self.monitor, self.monitor_mode = monitor, monitor_mode
        self._agreement = Agreement(backend, context)
        self._misses = 0
        self._is_tidy = False
        self._current: tuple[Path, str] | None = None  # where the state saved or loaded last is stored

    def save(self, state: TrainState, config: Mapping[str, Any], best_value: float | None) -> Path | None:
        """Commit a checkpoint of `state` and of the backend; every rank must call it, at the same step.

        `best_value` is the monitor's value for this state, None where it was not measured. Returns the checkpoint's
        path, or None where the disk failed on some rank: all ranks know, a warning is reported, training may go on.
        Raises TrainingError on all ranks when that happened three times in a row or when the state cannot be stored.
        """
        target = self.directory / step_name(state.step)
        try:
            if not self._save(target, state, config, best_value):
                return target
        except OSError as error:
            self._missed(target, error)
            return None
        finally:
            if self.context.is_main_process:
                shutil.rmtree(self._stage(target), ignore_errors=True)
        self._misses = 0
        if self.context.is_main_process:
            self._prune()
        return target

    def find(self) -> Path | None:
        """The newest checkpoint of the directory that verifies, on every rank, or None. A collective.

        Damaged ones in its way are set aside as `damaged-step-...`, each with one warning. Removes what a killed
        save left behind, so no other run may be writing here.
        """
        name = self._agreement.on_main(self._find_verified)
        return None if name is None else self.directory / str(name)

    def open(self, path: Path | str) -> Path:
        """The checkpoint that the user named (or the newest of a run directory), verified, on every rank. A collective.

        CheckpointError where it is missing or damaged: what was asked for is never replaced silently.
        """
        return Path(str(self._agreement.on_main(lambda: _open_verified(Path(path)))))

    def load(self, path: Path) -> TrainState:
        """Take up the checkpoint `path` (of `find` or `open`) in the backend, and return the state. A collective.

        CheckpointError, on every rank, where it belongs to another model or cannot be read.
        """
        return self._agreement.on_all(lambda: self._load(path))

    def _save(self, target: Path, state: TrainState, config: Mapping[str, Any], best_value: float | None) -> bool:
        """False where the very same state is stored already. OSError and TrainingError arise on all ranks alike."""
        stage = self._stage(target)
        if self._agreement.on_main(lambda: self._begin(target, state, best_value)):
            return False
        extra = self._agreement.on_all(lambda: self.backend.save(stage))
        self._agreement.on_main(lambda: self._commit(target, state, extra, config, best_value))
        return True

    def _begin(self, target: Path, state: TrainState, best_value: float | None) -> bool:
        if self._current == (target, _identity(state, best_value)):
            with contextlib.suppress(CheckpointError):
                verify(target)
                return True
        self._tidy()
        if not self.directory.is_dir():
            self.directory.mkdir(parents=True, exist_ok=True)
            sync(self.directory.parent)
        stage = self._stage(target)
        if stage.exists():
            shutil.rmtree(stage)
        stage.mkdir()
        return False

    def _commit(
        self, target: Path, state: TrainState, extra: Any, config: Mapping[str, Any], best_value: float | None
    ) -> None:
        stage = self._stage(target)
        _write_json(stage / STATE, _state_content(state, extra))
        names = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
        records = {name: _seal_file(stage / name) for name in names}
        manifest = self._manifest(state, config, best_value, records).to_bytes()
        write_file(stage / MANIFEST, [manifest], len(manifest))
        for directory in sorted({(stage / name).parent for name in names} | {stage}, reverse=True):
            sync(directory)
        self._put_in_place(stage, target)
        self._current = (target, _identity(state, best_value))

    def _manifest(
        self, state: TrainState, config: Mapping[str, Any], best_value: float | None, files: Mapping[str, FileRecord]
    ) -> Manifest:
        sequences = [info.manifest.sequence for info in list_checkpoints(self.directory) if info.manifest is not None]
        return Manifest(
            step=state.step,
            epoch=state.epoch,
            samples_seen=state.samples_seen,
            samples_in_epoch=state.samples_in_epoch,
            backend=self.backend.plan.backend,
            world_size=self.context.world_size,
            sequence=max(sequences, default=0) + 1,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            monitor=self.monitor,
            monitor_mode=self.monitor_mode,
            monitor_value=None if best_value is None or not math.isfinite(best_value) else float(best_value),
            config=json.loads(json.dumps(dict(config), default=str)),
            versions=_versions(),
            files=files,
        )

    def _put_in_place(self, stage: Path, target: Path) -> None:
        """Rename the finished stage. A directory cannot replace another in one step, so an old one of the same
        step stands aside under a name from which `_tidy` would bring it back."""
        old = target.with_name(_OLD + target.name)
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
        sync(self.directory)
        if old.exists():
            _discard(old)

    def _missed(self, target: Path, error: OSError) -> None:
        self._misses += 1
        message = f"checkpoint {target} could not be saved: {error.strerror or error}"
        if self.context.is_main_process:
            needed, free = self._bytes_needed(target), _bytes_free(self.directory)
            message += f" (needs at least {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB are free)"
            text = f"{message}; training goes on, miss {self._misses} of {MAX_MISSES} in a row"
            self.report({
                "kind": "warning", "message": text, "path": str(target), "cause": error.strerror or str(error),
                "bytes_needed": needed, "bytes_free": free,
            })  # fmt: skip
        if self._misses >= MAX_MISSES:
            raise TrainingError(f"{message}; {self._misses} misses in a row: free the disk and run again with --resume")

    def _bytes_needed(self, target: Path) -> int:
        """The larger of the newest checkpoint and what the failed save had begun; files get their length first."""
        manifests = [info.manifest for info in list_checkpoints(self.directory) if info.manifest is not None]
        newest = manifests[-1].total_bytes if manifests else 0
        with contextlib.suppress(OSError):
            newest = max(newest, sum(path.lstat().st_size for path in self._stage(target).rglob("*") if path.is_file()))
        return newest

    def _find_verified(self) -> str | None:
        try:
            self._tidy()
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {error.strerror or error}") from None
        for info in reversed(list_checkpoints(self.directory)):
            try:
                verify(info.path)
                return info.path.name
            except NewerFormatError:
                raise
            except CheckpointError as error:
                self._set_aside(info, str(error))
        return None

    def _set_aside(self, info: CheckpointInfo, reason: str) -> None:
        aside = _free_name(info.path.with_name(f"damaged-{info.path.name}"))
        try:
            info.path.rename(aside)
            where = f"set aside as {aside.name}"
        except OSError as error:
            where = f"left where it is ({error.strerror})"
        self._warn(f"{reason}; step {info.step} is {where}, an older checkpoint is used if there is one")

    def _load(self, path: Path) -> TrainState:
        state, extra = read_state(path)
        self.backend.load(path, extra)
        if self.context.is_main_process:
            self._current = (path, _identity(state, read_manifest(path).monitor_value))
        return state

    def _prune(self) -> None:
        """Keep the newest `keep_latest_k` and the best; main process. Sound by manifest and sizes is enough here: the
        newest was digested a moment ago. Damaged ones do not count and are left for `find` to set aside."""
        try:
            infos = [info for info in list_checkpoints(self.directory) if not info.problem]
            kept = infos[-self.keep_latest_k :]
            best = best_of(infos)
            if self.keep_best and best is not None:
                kept = [*kept, best]
            for info in infos:
                if info not in kept:
                    _discard(info.path)
        except OSError as error:
            self._warn(f"old checkpoints in {self.directory} could not be removed: {error.strerror}")

    def _tidy(self) -> None:
        """Once a process: remove what a killed save left, and bring back a checkpoint that was being replaced."""
        if self._is_tidy or not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            if path.name.startswith((_STAGE + "step-", _TRASH + "step-")):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(_OLD + "step-"):
                target = path.with_name(path.name.removeprefix(_OLD))
                if target.exists():
                    _discard(path)
                else:
                    path.rename(target)
        self._is_tidy = True

    def _stage(self, target: Path) -> Path:
        return target.with_name(_STAGE + target.name)

    def _warn(self, message: str) -> None:
        self.report({"kind": "warning", "message": message})


def _open_verified(path: Path) -> str:
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
    return str(checkpoint)


def _state_content(state: TrainState, extra: Any) -> dict[str, Any]:
    try:
        return {"train": encode(state.to_json(), "train"), "backend": json.loads(json.dumps(extra))}
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"the state cannot be stored in {STATE}: {error}; keep only plain values in it") from None


def _identity(state: TrainState, best_value: float | None) -> str:
    """Equal for states whose checkpoints would be equal; time spent does not count."""
    content = state.to_json() | {"train_time_s": 0.0, "best_value": best_value}
    try:
        return json.dumps(encode(content, "train"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(f"the state cannot be stored in {STATE}: {error}; keep only plain values in it") from None


def _write_json(path: Path, content: Any) -> None:
    raw = json.dumps(content, indent=1).encode()
    if len(raw) > _MAX_STATE_BYTES:
        raise TrainingError(
            f"{path.name} would have {len(raw)} bytes of {_MAX_STATE_BYTES} allowed: store less in callbacks"
        )
    write_file(path, [raw], len(raw))


def _seal_file(path: Path) -> FileRecord:
    sync(path)
    return FileRecord(path.stat().st_size, file_digest(path))


def _versions() -> dict[str, str]:
    """Versions of the libraries in use that shape what is stored."""
    versions = {"python": sys.version.split()[0], "distributed-trainer": _own_version()}
    for name in ("numpy", "safetensors", "tensorflow", "torch"):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("distributed-trainer")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


def _discard(path: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen as one."""
    trash = _free_name(path.with_name(_TRASH + path.name.removeprefix(_OLD)))
    path.rename(trash)
    shutil.rmtree(trash)


def _free_name(path: Path) -> Path:
    names = (path if i == 1 else path.with_name(f"{path.name}-{i}") for i in range(1, sys.maxsize))
    return next(name for name in names if not name.exists())


def _bytes_free(directory: Path) -> int:
    for parent in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(parent).free
    return 0
