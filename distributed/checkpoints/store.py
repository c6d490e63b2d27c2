"""CheckpointStore: save, find and load checkpoints on all ranks together. Loads no framework."""

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
from typing import Any, Protocol

from distributed.checkpoints.agreement import Agreement, Ranks
from distributed.checkpoints.directory import CheckpointDirectory, open_verified, stage_of
from distributed.checkpoints.durable import size_text, sync, write_file
from distributed.checkpoints.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    file_digest,
    read_manifest,
    step_name,
    verify,
)
from distributed.checkpoints.state_file import identity, read_state, write_state
from distributed.config.plan import ProcessPlan
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.errors import CheckpointError, TrainingError
from distributed.state import TrainState, WorkerContext

__all__ = ["CheckpointStore", "read_state"]

MAX_MISSES = 3  # training stops after so many failed saves in a row


class Stored(Protocol):
    """An adapter whose state is stored. It writes and reads its own part of a checkpoint."""

    plan: ProcessPlan
    config: DistributedConfig

    @property
    def world(self) -> Ranks:
        """The processes that write and read together."""

    def save(self, directory: Path, /) -> dict[str, Any]:
        """Write tensors into the staged checkpoint `directory`. Return the rest, JSON-able; that of rank 0 is kept."""

    def load(self, directory: Path, state: Mapping[str, Any], /) -> None:
        """Load what `save` wrote into `directory`. `state` is what `save` returned on rank 0."""


class CheckpointStore:
    """Save, find, open and load the checkpoints of one directory. Every rank must call each of these methods.

    A save is staged beside its target, fsynced, sealed by a manifest with a digest of every file, and only then
    renamed. A crash at any moment leaves the earlier checkpoints unchanged. The digests (xxh3_128) detect accidental
    damage, not forgery.

    Args:
        directory: where the checkpoints are.
        backend: the adapter that writes and reads the tensors.
        keep_latest_k: the number of newest checkpoints to keep.
        keep_best: whether to keep the checkpoint with the best monitor value too.
        monitor: the name of the metric that decides which one is best.
        monitor_mode: "min" or "max".
        context: the ranks and the device of this process.
        report: called on the main process with events such as `{"kind": "warning", "message": ...}`.
    """

    def __init__(
        self,
        directory: Path,
        backend: Stored,
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
        self._agreement = Agreement(backend.world, backend.config.timeout_s)
        self._files = CheckpointDirectory(directory, lambda text: report({"kind": "warning", "message": text}))
        self._misses = 0
        self._current: tuple[Path, str] | None = None  # path and identity of the state saved or loaded last

    def save(self, state: TrainState, config: Mapping[str, Any], best_value: float | None) -> Path | None:
        """Commit a checkpoint of `state` and of the backend. Every rank must call it at the same step.

        Args:
            state: the training state.
            config: the settings, for the manifest.
            best_value: the monitor's value for this state, or None if it was not measured.

        Returns:
            The path of the checkpoint, on every rank. None if the disk failed on some rank: a warning is reported, and
            training may continue.

        Raises:
            TrainingError: on all ranks, if the state cannot be stored or three saves in a row failed.
        """
        target = self.directory / step_name(state.step)
        try:
            self._save(target, state, config, best_value)
        except OSError as error:
            self._missed(target, error)
            return None
        finally:
            if self.context.is_main_process:
                shutil.rmtree(stage_of(target), ignore_errors=True)
        self._misses = 0
        return target

    def find(self) -> Path | None:
        """Return the newest checkpoint of the directory that verifies, or None, on every rank. Every rank must call it.

        Damaged checkpoints that are newer are set aside as `damaged-step-...`, each with one warning. Remains of a
        killed save are removed, so no other run may be writing to this directory. Raises CheckpointError if only
        damaged checkpoints are left.
        """
        name = self._agreement.on_main(self._files.newest_verified)
        return None if name is None else self.directory / name

    def open(self, path: Path | str) -> Path:
        """Return the verified checkpoint that `path` means (of a run directory the newest), on every rank.

        Every rank must call it. Raises CheckpointError if it is missing or damaged. Another checkpoint is never used in
        its place.
        """
        return Path(self._agreement.on_main(lambda: str(open_verified(Path(path)))))

    def load(self, path: Path) -> TrainState:
        """Load the checkpoint `path`, from `find` or `open`, into the backend and return the training state.

        Every rank must call it. Raises CheckpointError, on every rank, if it belongs to another model or cannot be
        read.
        """
        return self._agreement.on_all(lambda: self._load(path))

    def _save(self, target: Path, state: TrainState, config: Mapping[str, Any], best_value: float | None) -> None:
        """Save on all ranks. OSError and TrainingError are raised on all ranks alike."""
        if self._agreement.on_main(lambda: self._begin(target, state, best_value)):
            extra = self._agreement.on_all(lambda: self.backend.save(stage_of(target)))
            self._agreement.on_main(lambda: self._commit(target, state, extra, config, best_value))

    def _begin(self, target: Path, state: TrainState, best_value: float | None) -> bool:
        """Create the stage. Return False if this very state is stored already."""
        if self._current == (target, identity(state, best_value)):
            with contextlib.suppress(CheckpointError):
                verify(target)
                return False
        self._files.begin(target)
        return True

    def _commit(
        self, target: Path, state: TrainState, extra: Any, config: Mapping[str, Any], best_value: float | None
    ) -> None:
        stage = stage_of(target)
        write_state(stage, state, extra)
        everything = sorted(stage.rglob("*"))
        records = {str(path.relative_to(stage)): _seal_file(path) for path in everything if path.is_file()}
        manifest = self._manifest(state, config, best_value, records).to_bytes()
        write_file(stage / MANIFEST, [manifest], len(manifest))
        for directory in [*(path for path in everything if path.is_dir()), stage]:
            sync(directory)
        self._files.put_in_place(target)
        self._current = (target, identity(state, best_value))
        self._files.prune(self.keep_latest_k, self.keep_best)

    def _manifest(
        self, state: TrainState, config: Mapping[str, Any], best_value: float | None, files: Mapping[str, FileRecord]
    ) -> Manifest:
        return Manifest(
            step=state.step,
            epoch=state.epoch,
            samples_seen=state.samples_seen,
            samples_in_epoch=state.samples_in_epoch,
            backend=self.backend.plan.backend,
            world_size=self.context.world_size,
            sequence=self._files.next_sequence(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            monitor=self.monitor,
            monitor_mode=self.monitor_mode,
            monitor_value=None if best_value is None or not math.isfinite(best_value) else float(best_value),
            config=json.loads(json.dumps(dict(config), default=str)),
            versions=_versions(),
            files=files,
        )

    def _missed(self, target: Path, error: OSError) -> None:
        self._misses += 1
        message = f"checkpoint {target} could not be saved: {error.strerror or error}"
        if self.context.is_main_process:
            needed, free = self._files.bytes_needed(target), self._files.bytes_free()
            message += f" (needs at least {size_text(needed)}, {size_text(free)} free)"
            text = f"{message}; training continues after failed save {self._misses} of {MAX_MISSES} in a row"
            self.report({
                "kind": "warning", "message": text, "path": str(target), "cause": error.strerror or str(error),
                "bytes_needed": needed, "bytes_free": free,
            })  # fmt: skip
        if self._misses >= MAX_MISSES:
            raise TrainingError(
                f"{message}; {self._misses} failed saves in a row: free disk space and run again with --resume"
            )

    def _load(self, path: Path) -> TrainState:
        state, extra = read_state(path)
        self.backend.load(path, extra)
        if self.context.is_main_process:
            self._current = (path, identity(state, read_manifest(path).monitor_value))
        return state


def _seal_file(path: Path) -> FileRecord:
    sync(path)
    return FileRecord(path.stat().st_size, file_digest(path))


def _versions() -> dict[str, str]:
    """Return the versions of the loaded libraries that affect what is stored."""
    versions = {"python": sys.version.split()[0], "distributed-trainer": _own_version()}
    for name in sorted({"numpy", "safetensors", *(name for row in REGISTRY.values() for name in row.requires)}):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("distributed-trainer")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
