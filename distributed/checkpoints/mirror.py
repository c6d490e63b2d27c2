"""Keep the checkpoints of a directory in object storage too: upload in the background, find, download, prune.

A checkpoint is uploaded with its manifest last, so an upload that was cut off is never taken for a checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distributed.checkpoints.directory import CheckpointDirectory, kept, stage_of
from distributed.checkpoints.durable import size_text
from distributed.checkpoints.manifest import (
    MANIFEST,
    CheckpointInfo,
    NewerFormatError,
    list_checkpoints,
    manifest_of,
    read_manifest,
    step_name,
)
from distributed.checkpoints.objects import Objects, StorageError, unusable
from distributed.checkpoints.verifying import verify
from distributed.config.reading import MAX_MANIFEST_BYTES
from distributed.errors import CheckpointError

# Name of a checkpoint in the storage. A later checkpoint of the same step has the number of its save appended.
_NAME = re.compile(r"step-(\d{8,})(\.\d+)?")
UPLOAD_FAILED = "checkpoints could not be uploaded to"  # begins the message of uploads that failed
_PATIENT_S = 3.0  # until `drain` says what it waits for
_AGAIN_S = 60.0  # seconds until a failed upload is tried again; a new save starts the attempt earlier


@dataclasses.dataclass(frozen=True)
class Upload:
    """One checkpoint that has arrived: its local name, its step and bytes, and the seconds that the upload took."""

    checkpoint: str
    step: int
    num_bytes: int
    seconds: float


class Mirror:
    """Copy the checkpoints of a directory to object storage. Used by the main process only.

    A thread uploads the newest checkpoint that the storage lacks. Training never waits for it. A checkpoint that retention
    removes before its turn is not uploaded. A checkpoint is not removed while it is being uploaded.

    Args:
        objects: the storage.
        files: the directory of the checkpoints on this machine.
        keep_latest_k: the number of newest checkpoints to keep in the storage.
        keep_best: whether to keep the one with the best monitor value too.
        warn: called with one line of text for each problem. It is also called from the thread.
        tell: called with one line of text if `drain` has to wait.
        on_upload: called from the thread after each upload.
        copy_run: copies the other files of the run. Called from the thread before each checkpoint becomes visible in the storage,
            so that these files are never older than the checkpoint. Also called when no checkpoint is left to upload. It may
            raise OSError.
    """

    def __init__(
        self,
        objects: Objects,
        files: CheckpointDirectory,
        *,
        keep_latest_k: int,
        keep_best: bool,
        warn: Callable[[str], None],
        tell: Callable[[str], None] = lambda text: None,
        on_upload: Callable[[Upload], None] = lambda upload: None,
        copy_run: Callable[[], None] = lambda: None,
    ) -> None:
        self._objects, self._files = objects, files
        self._keep_latest_k, self._keep_best = keep_latest_k, keep_best
        self._warn, self._tell, self._on_upload, self._copy_run = warn, tell, on_upload, copy_run
        self._changed = threading.Condition()  # guards the fields below and the removal of local checkpoints
        self._stored: dict[str, CheckpointInfo] | None = None  # checkpoints of the storage, by their names there
        self._has_uploaded = False  # nothing is removed from the storage before the first upload
        self._busy, self._busy_bytes = "", 0  # local name and size of the checkpoint that is being uploaded
        self._wanted = self._tried = self._done = 0  # numbers of requests: made, attempted, fulfilled
        self._problem = ""  # why the last attempt failed
        self._is_leaving = False  # whether the thread is to end once all requests were attempted
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """The address below which the checkpoints are."""
        return self._objects.address

    # ------------------------------------------------------------------ find

    def stored(self) -> list[CheckpointInfo]:
        """Return the checkpoints of the storage as `stored_checkpoints` does. The storage is read once."""
        if self._stored is None:
            self._stored = {str(info.path): info for info in stored_checkpoints(self._objects)}
        with self._changed:
            return sorted(self._stored.values(), key=lambda info: info.sort_key)

    def fetch_newer(self, than: str | None) -> str | None:
        """Download the newest checkpoint of the storage that verifies, if it is newer than the local checkpoint `than`.

        Returns its local name, or `than` if the storage has no newer one. For each damaged checkpoint, a warning is shown and the
        next older checkpoint is tried. Raises CheckpointError if the storage holds only damaged checkpoints and there is no local
        one. Raises StorageError if the storage cannot be read.
        """
        least = -1 if than is None else read_manifest(self._files.path / than).sequence
        newer = [info for info in self.stored() if info.manifest is None or info.manifest.sequence > least]
        for info in reversed(newer):
            problem = info.problem
            try:
                if not problem:
                    return self._fetch(info)
            except CheckpointError as error:
                problem = str(error)
                self._record(dataclasses.replace(info, problem=problem))
            self._warn(
                f"{self.address}/{info.path.name} is damaged ({problem}): an older checkpoint is used if there is one"
            )
        if newer and than is None:
            names = ", ".join(info.path.name for info in newer[-3:])
            raise CheckpointError(
                f"{self.address} holds only damaged checkpoints ({names}): copy an undamaged one there, or start a new run with"
                " another --run-dir or --checkpoint-dir"
            )
        return than

    def next_sequence(self) -> int:
        """Return a number above those of all saves in the storage."""
        with self._changed:
            stored = self._stored.values() if self._stored is not None else ()
            return 1 + max((info.manifest.sequence for info in stored if info.manifest is not None), default=0)

    def _fetch(self, info: CheckpointInfo) -> str:
        """Download a checkpoint into the local directory and return its local name. Raises CheckpointError if it is damaged."""
        target = self._files.path / step_name(info.step)
        self._files.begin(target)
        fetch(self._objects, info, stage_of(target))
        self._files.put_in_place(target)
        return target.name

    def _record(self, info: CheckpointInfo) -> None:
        """Record a checkpoint of the storage."""
        with self._changed:
            self._stored = {**(self._stored or {}), str(info.path): info}

    # ------------------------------------------------------------------ upload

    @contextlib.contextmanager
    def pruning(self) -> Iterator[str]:
        """Let local checkpoints be removed inside the context. Yields the name of the one that must stay, or ""."""
        with self._changed:
            yield self._busy

    def notify(self) -> int:
        """Let the thread upload what the storage lacks. Return the number of this request."""
        with self._changed:
            self._wanted += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="distributed-upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._wanted

    def drain(self) -> str:
        """Wait until the storage has all checkpoints that retention keeps, and end the thread. Return "", or why this failed."""
        with self._changed:
            self._is_leaving = True
            number = self.notify()
            if not self._changed.wait_for(lambda: self._thread is None, _PATIENT_S):
                what = f"of {self._busy} ({size_text(self._busy_bytes)})" if self._busy else "of the last files"
                self._tell(f"waiting for the upload {what} to {self.address}")
                self._changed.wait_for(lambda: self._thread is None)
            self._is_leaving = False
            return "" if self._done >= number else self._problem

    def _run(self) -> None:
        problem, ended = "", "the thread that uploads ended with an error"
        try:
            while not (self._is_leaving and self._tried >= self._wanted):
                with self._changed:
                    seconds = _AGAIN_S if self._tried > self._done else None
                    self._changed.wait_for(lambda: self._wanted > self._tried, seconds)
                    number = self._wanted
                problem = self._attempt()
                with self._changed:
                    if problem and problem != self._problem:
                        self._warn(f"{UPLOAD_FAILED} {self.address}: {problem}; training continues")
                    self._tried, self._problem = number, problem
                    self._done = self._done if problem else number
            ended = problem
        finally:  # after an error of this code too, so that `drain` does not wait for ever
            with self._changed:
                self._thread, self._problem = None, ended
                self._changed.notify_all()

    def _attempt(self) -> str:
        """Upload and prune. Return "", or why this failed."""
        try:
            self.stored()
            while (info := self._choose()) is not None:
                self._upload(info)
            self._prune()
            with self.pruning() as busy:  # removes the checkpoints that had to stay during their upload
                self._files.prune(self._keep_latest_k, self._keep_best, busy)
            self._copy_run()
        except (OSError, CheckpointError) as error:
            return str(error)
        finally:
            with self._changed:
                self._busy = ""
        return ""

    def _choose(self) -> CheckpointInfo | None:
        """Return the newest local checkpoint that the storage lacks and should keep, and protect it from removal."""
        with self._changed:
            local = [
                info for info in list_checkpoints(self._files.path) if info.manifest is not None and not info.problem
            ]
            stored = list(self._stored.values()) if self._stored is not None else []
            there = {info.sort_key for info in stored if not info.problem}
            missing = [info for info in local if info.sort_key not in there]
            keep = self._kept([*stored, *missing])
            chosen = max((info for info in missing if info in keep), key=lambda info: info.sort_key, default=None)
            self._busy = "" if chosen is None else chosen.path.name
            self._busy_bytes = 0 if chosen is None or chosen.manifest is None else chosen.manifest.total_bytes
            return chosen

    def _upload(self, info: CheckpointInfo) -> None:
        """Upload a checkpoint, its manifest last. Other files of its folder, left by an upload that was cut off, are removed.

        A save of the same step may replace the local files meanwhile. The upload is then abandoned.
        """
        assert info.manifest is not None and self._stored is not None
        began, name = time.monotonic(), info.path.name
        if name in self._stored:  # it stays until the new one is complete
            name = f"{name}.{info.manifest.sequence}"
        manifest = _bytes_of(info)
        files = {f"{name}/{file}": info.path / file for file in info.manifest.files}
        try:
            self._objects.remove(sorted(self._objects.sizes(name).keys() - files.keys()))
            for there, here in files.items():
                self._objects.put(here, there)
        except StorageError:
            if _bytes_of(info) == manifest:
                raise
        if not manifest or _bytes_of(info) != manifest:
            return
        self._copy_run()
        self._objects.write(f"{name}/{MANIFEST}", manifest)
        self._record(dataclasses.replace(info, path=Path(name), is_best=False))
        self._has_uploaded = True
        self._on_upload(Upload(info.path.name, info.step, info.manifest.total_bytes, time.monotonic() - began))

    def _prune(self) -> None:
        """Remove the checkpoints that retention does not keep, and what uploads that were cut off have left.

        Nothing is removed before this object has uploaded a checkpoint of its run. A damaged checkpoint is kept if retention
        would keep a sound one in its place. A checkpoint whose manifest cannot be read is never removed.
        """
        assert self._stored is not None
        if not self._has_uploaded:
            return
        infos = list(self._stored.values())
        unreadable = [info for info in infos if info.manifest is None]
        as_if_sound = [dataclasses.replace(info, problem="") for info in infos if info.manifest is not None]
        keep = {info.path.name for info in (*self._kept(infos), *self._kept(as_if_sound), *unreadable)}
        found = [name for name in self._objects.sizes() if _NAME.fullmatch(name.partition("/")[0])]
        gone = [name for name in found if name.partition("/")[0] not in keep]
        with self._changed:
            self._stored = {name: info for name, info in self._stored.items() if name in keep}
        self._objects.remove(sorted(gone, key=lambda name: (not name.endswith(f"/{MANIFEST}"), name)))

    def _kept(self, infos: list[CheckpointInfo]) -> list[CheckpointInfo]:
        """Return the sound checkpoints of `infos` that the storage is to keep. If a step has several, only the newest counts."""
        sound = [info for info in infos if not info.problem]
        newest = {info.step: info for info in sorted(sound, key=lambda info: info.sort_key)}
        return kept(sorted(newest.values(), key=lambda info: info.sort_key), self._keep_latest_k, self._keep_best)


def stored_checkpoints(objects: Objects, folder: str = "") -> list[CheckpointInfo]:
    """Return the checkpoints of the storage that have a manifest, oldest first. `path` is the name below the address.

    `problem` says if the manifest is damaged, or if a file is missing or has another size than in the manifest. Raises
    StorageError if the storage cannot be read, and NewerFormatError if a later version of this package wrote a checkpoint.
    """
    sizes = objects.sizes(folder)
    found = []
    for name in (name for name in sizes if _is_manifest(name, folder)):
        path = name.removesuffix(MANIFEST).rstrip("/")
        try:
            if sizes[name] > MAX_MANIFEST_BYTES:
                raise CheckpointError(
                    f"{objects.address}/{name} has {sizes[name]} bytes, {MAX_MANIFEST_BYTES} are allowed"
                )
            manifest = manifest_of(f"{objects.address}/{path}".rstrip("/"), objects.read(name))
        except NewerFormatError:
            raise
        except CheckpointError as error:
            step = _NAME.search(f"{objects.address}/{path}".rstrip("/").rpartition("/")[2])
            found.append(CheckpointInfo(Path(path), int(step[1]) if step else 0, None, str(error)))
            continue
        wrong = [
            each
            for each, record in manifest.files.items()
            if sizes.get(name.removesuffix(MANIFEST) + each) != record.bytes
        ]
        problem = (
            f"{objects.address}/{path}: {wrong[0]} is missing or does not have the size that was saved" if wrong else ""
        )
        found.append(CheckpointInfo(Path(path), manifest.step, manifest, problem))
    return sorted(found, key=lambda info: info.sort_key)


def _is_manifest(name: str, folder: str) -> bool:
    return re.fullmatch(rf"({re.escape(folder)}/)?({_NAME.pattern}/)?{MANIFEST}", name) is not None


def fetch(objects: Objects, info: CheckpointInfo, directory: Path) -> None:
    """Download a checkpoint of `stored_checkpoints` into an empty directory. Raises CheckpointError if it is damaged."""
    assert info.manifest is not None
    for name in (*info.manifest.files, MANIFEST):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            objects.get((info.path / name).as_posix(), directory / name)
        except StorageError as error:
            if not error.is_missing:
                raise
            raise CheckpointError(f"{name} is missing") from None
    verify(directory)


def fetch_newest(address: str, into: Path) -> Path:
    """Download the checkpoint that `address` means into a new directory below `into`, verify it, and return its path.

    Args:
        address: the address of a checkpoint, of a directory of checkpoints, or of a run. For the last two, the newest checkpoint
            is downloaded.
        into: a directory, which is created.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged. No other checkpoint is used instead.
        ConfigError: the storage refuses access.
        ResourceError: the storage does not answer.
    """
    objects = Objects(address)
    try:
        infos = stored_checkpoints(objects) or stored_checkpoints(objects, "checkpoints")
        if not infos:
            raise CheckpointError(
                f"{address} holds no checkpoint: give the address of a run or of one of its checkpoints/step-..."
            )
        if infos[-1].problem:
            sound = [f"{address}/{info.path.as_posix()}" for info in infos if not info.problem]
            hint = (
                f"another checkpoint, whose files have the right sizes, is {sound[-1]}"
                if sound
                else "there is no other one"
            )
            raise CheckpointError(f"{infos[-1].problem}; {hint}")
        path = into / step_name(infos[-1].step)
        path.mkdir(parents=True)
        fetch(objects, infos[-1], path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(into), address)) from None
    except OSError as error:
        raise unusable(f"{address} cannot be read: {error}", error) from None
    return path


def _bytes_of(info: CheckpointInfo) -> bytes:
    """Return the present bytes of the manifest of `info`, or b"" if the file does not exist."""
    try:
        return (info.path / MANIFEST).read_bytes()
    except FileNotFoundError:
        return b""
