"""CheckpointStore: save, find and load checkpoints on all ranks together. Loads no framework."""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib.metadata
import json
import math
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from distributed.checkpoints.agreement import Agreement, Ranks
from distributed.checkpoints.background import BackgroundSave, Records
from distributed.checkpoints.copies import Copies
from distributed.checkpoints.digests import FileRecord
from distributed.checkpoints.directory import CheckpointDirectory, beside, open_verified, stage_of
from distributed.checkpoints.durable import records_of_written, size_text
from distributed.checkpoints.loading import CheckpointReader, Loads
from distributed.checkpoints.manifest import (
    Manifest,
    NewerFormatError,
    inspect,
    read_manifest,
    step_name,
    summary_of_frozen,
)
from distributed.checkpoints.mirror import UPLOAD_FAILED, Mirror, Upload, fetch_newest
from distributed.checkpoints.objects import Objects, unusable
from distributed.checkpoints.staging import Copying, Staging
from distributed.checkpoints.state_file import identity, read_state, write_state
from distributed.checkpoints.verifying import verify
from distributed.config.addresses import check_address, is_address
from distributed.config.plan import ProcessPlan
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.errors import CheckpointError, DamagedError, DistributedError, TrainingError
from distributed.state import OnEvent, TrainState, WorkerContext

__all__ = ["CheckpointStore", "read_state"]

_OPENED = ".opened"  # directory beside the checkpoints for one that was downloaded to start from
Written = Mapping[Path, FileRecord]  # of the files that this rank has written


class Stored(Loads, Protocol):
    """Protocol of an adapter whose state is stored. The adapter writes and reads its own part of a checkpoint."""

    plan: ProcessPlan
    config: DistributedConfig
    copying: Copying

    @property
    def world(self) -> Ranks:
        """The processes that write and read together."""

    def save(self, directory: Path, /) -> dict[str, Any]:
        """Write tensors into the staged checkpoint `directory`. Return the rest of the state, JSON-able. Only rank 0's
        is stored. An entry `frozen` maps each parameter that is left out to its `bytes` and its `xxh3_128`, among others."""


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
        on_event: called on the main process with events such as `{"kind": "warning", "text": ...}`.
        objects: object storage to which the checkpoints are copied, or None.
        on_upload: called on the main process, from a thread, when a checkpoint has arrived there.
        copy_run: called in that thread before a checkpoint becomes visible there, and when no checkpoint is left to upload. It may
            raise OSError.
        max_failed_saves: the number of failed saves in a row after which `save` raises.
        is_restart: whether an earlier attempt of the same launch has used these checkpoints. `find` then uses the newest one of
            this machine if the storage cannot be read.
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
        on_event: OnEvent,
        objects: Objects | None = None,
        on_upload: Callable[[Upload], None] = lambda upload: None,
        copy_run: Callable[[], None] = lambda: None,
        max_failed_saves: int = 3,
        is_restart: bool = False,
    ) -> None:
        self.directory, self.backend, self.context, self.on_event = directory, backend, context, on_event
        self.keep_latest_k, self.keep_best = keep_latest_k, keep_best
        self.monitor, self.monitor_mode = monitor, monitor_mode
        self._agreement = Agreement(backend.world, backend.config.timeout_s)
        self._copies = Copies(directory, self._agreement)
        self._reader = CheckpointReader(backend, self._agreement, self._copies)
        self._files = CheckpointDirectory(directory, self._warn)
        self._mirror: Mirror | None = None  # on the main process
        if objects is not None and context.is_main_process:
            self._mirror = Mirror(
                objects, self._files, keep_latest_k=keep_latest_k, keep_best=keep_best, warn=self._warn,
                tell=lambda text: on_event({"kind": "notice", "text": text}), on_upload=on_upload, copy_run=copy_run,
            )  # fmt: skip
        self._max_failed_saves, self._is_restart = max_failed_saves, is_restart
        self._misses = 0
        self._pending: Path | None = None  # the checkpoint that is saved in the background
        self._background: BackgroundSave | None = None
        self._staging = Staging(lambda num_bytes: backend.copying.allocate(num_bytes))
        self._name: str | None = None
        self._num_begun = 0
        # Path and identity of the state saved or loaded last. The identity of a loaded one, None, is computed if it is needed.
        self._current: tuple[Path, str | None] | None = None
        # The checkpoint that `find` has returned last, and that of `open`, if `resume` has to verify large tensors of it.
        self._found: Path | None = None
        self._opened: Path | None = None

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
            TrainingError: on all ranks, if the state cannot be stored or `max_failed_saves` saves in a row failed.
        """
        target = self.directory / step_name(state.step)
        try:
            self._save(target, state, config, best_value)
        except OSError as error:
            self._missed(target, error)
            return None
        finally:
            self._remove_stage(target)
        self._misses = 0
        return target

    def save_in_background(
        self, state: TrainState, config: Mapping[str, Any], best_value: float | None, when_over: Callable[[], None]
    ) -> bool:
        """Copy the state, and let a thread write and commit the checkpoint. Every rank must call it, after `finish`.

        The arguments are those of `save`. `when_over` is called on the main process, from the thread, when the checkpoint has been
        committed or has failed. `finish` returns at once from then on.

        Returns:
            Whether the save has begun, on every rank. False if the disk failed on some rank: a warning is reported.

        Raises:
            TrainingError: on all ranks, if the state cannot be stored or copied, or `max_failed_saves` saves in a row failed.
        """
        target = self.directory / step_name(state.step)
        try:
            self._background = self._begin_in_background(target, state, config, best_value, when_over)
        except OSError as error:
            self._remove_stage(target)
            self._missed(target, error)
            return False
        except DistributedError:
            self._remove_stage(target)
            raise
        self._pending = target
        return True

    def finish(self) -> Path | None:
        """Wait for the save that was begun in the background. Every rank must call it, after `save_in_background`.

        Returns and raises the same as `save`.
        """
        target, background = self._pending, self._background
        assert target is not None
        self._pending = self._background = None
        try:
            if background is not None:
                background.wait()
        except OSError as error:
            self._missed(target, error)
            return None
        finally:
            self._remove_stage(target)
        self._misses = 0
        return target

    def give_up(self) -> None:
        """End a save in the background because training has failed. No collective."""
        if self._background is not None and self._pending is not None:
            self._background.give_up()
            self._remove_stage(self._pending)
        self._pending = self._background = None

    def close(self) -> None:
        """Remove the files beside the checkpoints that only a running fit needs, and release the memory for copies of the state.

        Not a collective. Do not save after this call.
        """
        self._copies.close()
        self._staging.release()
        if self.context.is_main_process:
            self._remove_opened()

    def _begin_in_background(
        self,
        target: Path,
        state: TrainState,
        config: Mapping[str, Any],
        best_value: float | None,
        when_over: Callable[[], None],
    ) -> BackgroundSave | None:
        """Copy the state and start the thread. Return None if this state is stored already. A collective."""
        stage = stage_of(target)
        with self._staging.copying(stage):
            has_begun, extra = self._agreement.on_all(lambda: self._copy_and_begin(target, state, best_value))
        if not self._agreement.world.broadcast(has_begun):
            if self.context.is_main_process:
                when_over()
            return None
        if self._name is None:  # random, because other stores of this process may use the same keys
            self._name = str(self._agreement.world.broadcast(secrets.token_hex(4)))
        self._num_begun += 1
        manifest, which = self._manifest(state, config, best_value, extra), identity(state, best_value)
        return BackgroundSave(
            self._agreement.world.key_value_store(), self.context, f"save-{self._name}/{self._num_begun}",
            write=lambda: _below(stage, self._staging.write()),
            commit=lambda records: self._commit(target, manifest, which, records), when_over=when_over,
        )  # fmt: skip

    def _copy_and_begin(self, target: Path, state: TrainState, best_value: float | None) -> tuple[bool, dict[str, Any]]:
        """Copy this rank's part of the state, and create the stage on the main process. Return what `_begin` and `Backend.save` return.

        The copies are made first, because `Backend.save` is a collective, which has a timeout, and a disk may take longer.
        """
        extra = self.backend.save(stage_of(target))
        if not self.context.is_main_process:
            return True, extra
        has_begun = self._begin(target, state, best_value)
        write_state(stage_of(target), state, extra)
        return has_begun, extra

    def _remove_stage(self, target: Path) -> None:
        if self.context.is_main_process:
            shutil.rmtree(stage_of(target), ignore_errors=True)
        self._copies.clear(stage_of(target))

    def is_lost(self) -> bool:
        """Return whether the newest checkpoint of this run was deleted. Every rank must call it."""
        return self._agreement.on_main(lambda: bool(self._files.lost()))

    def is_shared(self) -> bool:
        """Return whether all ranks see the directory of the main process. Every rank must call it."""
        return not self._copies.away()

    def deliver(self, path: Path) -> Path:
        """Give the checkpoint `path` to the nodes that do not share the directory. Return the path at which this rank sees it.

        Every rank must call it.
        """
        return self._copies.deliver(path)

    def find(self, *, in_full: bool = False) -> Path | None:
        """Return the newest checkpoint of the directory that verifies, or None, on every rank. Every rank must call it.

        Each rank reads a part of the files. `resume` verifies large tensors later, while it loads them, unless `in_full`. Damaged
        checkpoints that are newer are set aside as `damaged-step-...`, each with one warning. Remains of a killed save are removed, so
        no other run may be writing to this directory. Raises CheckpointError if only damaged checkpoints are left or a damaged one
        cannot be renamed, ResourceError if object storage, which may have a newer one, does not answer.
        """
        self._found = None
        while (name := self._agreement.on_main(self._newest)) is not None:
            path = self.directory / name
            try:
                self._reader.verify(path, in_full=in_full)
                break
            except CheckpointError as error:
                problem = str(error)
            self._set_aside(path, problem)
        if in_full or name is None:
            self._upload_rest()
        elif name is not None:
            self._found = self.directory / name
        return None if name is None else self.directory / name

    def _set_aside(self, path: Path, problem: str) -> None:
        """Rename a damaged checkpoint. A collective. Raises CheckpointError, on every rank, if that is not possible."""
        if why := self._agreement.on_main(lambda: self._files.set_aside(path, problem)):
            raise CheckpointError(f"{problem}; it cannot be renamed ({why}): remove it")

    def _upload_rest(self) -> None:
        """Upload what an earlier attempt has not uploaded before it ended. Call it when the newest checkpoint is verified."""
        if self._mirror is not None:
            self._mirror.notify()

    def stored_elsewhere(self) -> bool:
        """Return whether object storage has checkpoints, damaged ones included. No collective; to be called on the main process."""
        try:
            return self._mirror is not None and bool(self._mirror.stored())
        except OSError as error:
            assert self._mirror is not None
            raise unusable(f"{self._mirror.address} cannot be read: {error}", error, CheckpointError) from None

    @property
    def address(self) -> str | None:
        """The address to which the checkpoints are copied, on the main process. None without one, and on other ranks."""
        return None if self._mirror is None else self._mirror.address

    def settle(self) -> None:
        """Wait until object storage, if any is used, has all checkpoints that are kept. Every rank must call it.

        Raises TrainingError, on every rank, if this fails.
        """
        self._agreement.on_main(self._drain)

    def finish_uploads(self) -> str:
        """Wait until object storage has all checkpoints that are kept. Return "" or why this failed. No collective.

        Does nothing on other ranks than the main process.
        """
        if self._mirror is None or not (problem := self._mirror.drain()):
            return ""
        return f"{UPLOAD_FAILED} {self._mirror.address}: {problem}; they are in {self.directory}: run again with --resume to upload them"

    def open(self, path: Path | str) -> Path:
        """Verify the checkpoint that `path` means and return its path on every rank. Every rank must call it.

        Each rank reads a part of the files. `resume` verifies large tensors later, while it loads them. If `path` is a run directory,
        its newest checkpoint is meant. If `path` is an address, the main process downloads the checkpoint, and the next save or `close`
        removes the copy. Raises CheckpointError if the checkpoint is missing or damaged. No other checkpoint is used instead.
        """
        opened = Path(self._agreement.on_main(lambda: str(self._open(path))))
        try:
            self._reader.verify(opened, in_full=False)
        except CheckpointError as error:
            raise self._not_replaced(opened, error) from None
        self._opened = opened
        return opened

    def _not_replaced(self, opened: Path, error: CheckpointError) -> CheckpointError:
        """Return the error for a damaged checkpoint that was asked for. A collective."""
        return CheckpointError(f"{error}; {self._agreement.on_main(lambda: beside(opened))}")

    def resume(self, path: Path) -> tuple[Path, TrainState]:
        """Load the checkpoint `path`, from `find` or `open`, into the backend. Return the checkpoint and the training state.

        Large tensors that `find` or `open` has left are verified. If one of them is damaged, a checkpoint from `find` is set aside, and
        the one before it is loaded. Every rank must call it. Raises CheckpointError, on every rank, if the checkpoint belongs to another
        model or cannot be read, or as `find` and `open` do.
        """
        while True:
            try:
                state = self._reader.load(path, is_verified=path not in (self._found, self._opened))
                break
            except DamagedError as error:
                if path != self._found:
                    raise self._not_replaced(path, error) from None
                damage = str(error)
            self._set_aside(path, damage)
            found = self.find()
            assert found is not None, "`find` raises an error if only damaged checkpoints are left"
            path = found
        if path == self._found:
            self._upload_rest()
        if self.context.is_main_process:
            self._current = (path, None)
        return path, state

    def _save(self, target: Path, state: TrainState, config: Mapping[str, Any], best_value: float | None) -> None:
        """Save on all ranks. An OSError or a TrainingError of one rank is raised on all ranks."""
        if self._agreement.on_main(lambda: self._begin(target, state, best_value)):
            if self._copies.away():  # an earlier attempt may have left files there
                self._agreement.on_all(lambda: self._copies.clear(stage_of(target)))
            with records_of_written() as written:
                extra = self._agreement.on_all(lambda: self.backend.save(stage_of(target)))
            self._copies.gather(stage_of(target))
            known = self._known_records(stage_of(target), written)
            self._agreement.on_main(lambda: self._seal(target, state, extra, config, best_value, known))

    def _known_records(self, stage: Path, written: Written) -> dict[str, FileRecord]:
        """Return the records of the files that all ranks wrote into `stage`, by name. A collective.

        Files that were sent between nodes are left out, because the main process has to read what has arrived.
        """
        is_away = self.context.rank in self._copies.away()
        mine = {} if is_away else {name: record.to_json() for name, record in _below(stage, written).items()}
        found = self._agreement.world.gather(mine)
        return {name: FileRecord.from_json(record) for each in found for name, record in each.items()}

    def _warn(self, text: str) -> None:
        self.on_event({"kind": "warning", "text": text})

    def _newest(self) -> str | None:
        """Return the name of the newest checkpoint, after downloading it if only object storage has it. Its digests are not checked."""
        if self._mirror is None:
            return self._files.newest()
        here, damaged = None, None
        try:
            here = self._files.newest()
        except NewerFormatError:
            raise
        except CheckpointError as error:  # only damaged ones are left here
            damaged = error
        try:
            found = self._mirror.fetch_newer(here)
        except OSError as error:
            text = f"{self._mirror.address} cannot be read: {error}"
            if here is None or not self._is_restart:
                raise unusable(text, error, CheckpointError) from None
            self._warn(f"{text}; {here} of {self.directory} is used")
            found = here
        if found is None and damaged is not None:
            raise damaged
        return found

    def _open(self, path: Path | str) -> Path:
        if not is_address(path):
            return open_verified(Path(path), inspect)
        into = (self.directory / _OPENED).absolute()
        self._remove_opened()
        return fetch_newest(check_address("resume_from_checkpoint", path), into)

    def _remove_opened(self) -> None:
        """Remove a downloaded checkpoint. Not done right after the load, because a backend may read a part of it later."""
        shutil.rmtree(self.directory / _OPENED, ignore_errors=True)

    def _drain(self) -> None:
        if problem := self.finish_uploads():
            raise TrainingError(problem)

    def _begin(self, target: Path, state: TrainState, best_value: float | None) -> bool:
        """Create the stage. Return False if this state is already stored at `target`."""
        if self._is_current(target, identity(state, best_value)):
            with contextlib.suppress(CheckpointError):
                verify(target)
                return False
        if lost := self._files.lost():
            text = f"{lost} was deleted while the run uses it: {target.name} is saved in full in {self.directory}"
            self.on_event({"kind": "warning", "text": text, "deleted": lost})
        self._files.begin(target)
        return True

    def _is_current(self, target: Path, which: str) -> bool:
        """Return whether the state with the identity `which` was saved last at `target`, or loaded last from there."""
        if self._current is None or self._current[0] != target:
            return False
        with contextlib.suppress(CheckpointError):
            return which == (self._current[1] or identity(read_state(target)[0], read_manifest(target).monitor_value))
        return False

    def _seal(
        self,
        target: Path,
        state: TrainState,
        extra: Any,
        config: Mapping[str, Any],
        best_value: float | None,
        known: Records,
    ) -> None:
        with records_of_written() as written:
            write_state(stage_of(target), state, extra)
        known = {**known, **_below(stage_of(target), written)}
        self._commit(target, self._manifest(state, config, best_value, extra), identity(state, best_value), known)

    def _commit(self, target: Path, manifest: Manifest, which: str, known: Records) -> None:
        """Write the manifest and rename the stage. `which` identifies the state. Called on the main process, from any thread."""
        self._files.seal(target, manifest, known, 0 if self._mirror is None else self._mirror.next_sequence())
        self._files.put_in_place(target)
        self._current = (target, which)
        self._remove_opened()
        if self._mirror is None:
            self._files.prune(self.keep_latest_k, self.keep_best)
            return
        with self._mirror.pruning() as busy:
            self._files.prune(self.keep_latest_k, self.keep_best, busy)
        self._mirror.notify()

    def _manifest(
        self, state: TrainState, config: Mapping[str, Any], best_value: float | None, extra: Mapping[str, Any]
    ) -> Manifest:
        """Return the manifest without the files and the sequence number."""
        return Manifest(
            step=state.step,
            epoch=state.epoch,
            samples_seen=state.samples_seen,
            samples_in_epoch=state.samples_in_epoch,
            backend=self.backend.plan.backend,
            world_size=self.context.world_size,
            sequence=0,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            monitor=self.monitor,
            monitor_mode=self.monitor_mode,
            monitor_value=None if best_value is None or not math.isfinite(best_value) else float(best_value),
            config=json.loads(json.dumps(dict(config), default=str)),
            versions=_versions(),
            files={},
            frozen=summary_of_frozen(extra.get("frozen")),
        )

    def _missed(self, target: Path, error: OSError) -> None:
        """Report a save that failed because of the disk. Raises TrainingError after `max_failed_saves` failed
        saves in a row."""
        self._misses += 1
        is_full, is_last = error.errno in (errno.ENOSPC, errno.EDQUOT), self._misses >= self._max_failed_saves
        message = f"checkpoint {target} could not be saved: {error.strerror or error}"
        if self.context.is_main_process:
            needed, free = self._files.bytes_needed(target), self._files.bytes_free()
            if is_full:
                message += f" (needs at least {size_text(needed)}, {size_text(free)} free)"
            then = f"failed save {self._misses} of {self._max_failed_saves} in a row"
            text = f"{message}; {then}" if is_last else f"{message}; training continues after {then}"
            self.on_event({
                "kind": "warning", "text": text, "path": str(target), "cause": error.strerror or str(error),
                "bytes_needed": needed, "bytes_free": free,
            })  # fmt: skip
        if is_last:
            raise TrainingError(
                f"{message}; {self._misses} failed saves in a row (max_failed_saves): "
                f"{'free disk space' if is_full else 'see that its directory can be written'}, and run again with --resume"
            )


def _below(stage: Path, written: Written) -> dict[str, FileRecord]:
    """Return the records of the files below `stage` by their names."""
    return {str(path.relative_to(stage)): record for path, record in written.items() if path.is_relative_to(stage)}


def _versions() -> dict[str, str]:
    """Return the versions of the loaded libraries that affect what is stored."""
    versions = {"python": sys.version.split()[0], "distributed-trainer": _own_version()}
    for name in sorted({"numpy", "safetensors", *(name for entry in REGISTRY.values() for name in entry.requires)}):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return versions


@functools.cache
def _own_version() -> str:
    try:
        return importlib.metadata.version("distributed-trainer")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return "unknown"
