"""A run directory in object storage: the run works in a directory of this machine, whose files are copied there."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from distributed.checkpoints.directory import CheckpointDirectory
from distributed.checkpoints.durable import replace_text
from distributed.checkpoints.mirror import UPLOAD_FAILED, Mirror
from distributed.checkpoints.objects import Objects, unusable
from distributed.config.addresses import below, check_address, check_library, is_address
from distributed.config.reading import MAX_RECORD_BYTES, parse_json, read_bytes
from distributed.errors import BY_EXIT_CODE, ConfigError, DistributedError
from distributed.runs.directory import REMOTE, RunDirectory

_CHECKPOINTS = "checkpoints"
_JOURNAL = "events.jsonl"
_SNAPSHOT = ".upload"


@dataclasses.dataclass
class RemoteRun:
    """The copy at `address` of the run directory `path`."""

    path: Path
    address: str
    # Name of a file -> its bytes and its time of change when it was uploaded.
    _sent: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> RemoteRun | None:
        """Return the copy of the run at `path`, or None. `path` may also be the directory of a further Trainer in the run."""
        for directory in (path, path.parent):
            if address := _record(directory).get("address"):
                return cls(directory, str(address))
        return None

    def checkpoints_of(self, run: Path) -> str:
        """Return the address of the checkpoints of `run`, which is `path` or a directory in it."""
        inside = run.relative_to(self.path)
        return below(self.address, (inside / _CHECKPOINTS).as_posix())

    def push(self) -> None:
        """Upload the files that have changed since the last call, without checkpoints. Raises StorageError if this fails."""
        objects = Objects(self.address)
        snapshot = self.path / _SNAPSHOT  # a copy of one file, because the file may grow during the upload
        try:
            # The journal comes last: it is never newer in the storage than the files beside it.
            for name, file in sorted(_files(self.path), key=lambda each: each[0] == _JOURNAL):
                status = file.stat()
                if self._sent.get(name) == (status.st_size, status.st_mtime_ns):
                    continue
                shutil.copyfile(file, snapshot)
                objects.put(snapshot, name)
                self._sent[name] = (status.st_size, status.st_mtime_ns)
        finally:
            snapshot.unlink(missing_ok=True)


def directory_of(run_dir: str | None) -> str | None:
    """Return the local directory for `run_dir`: a directory below `runs` if it is an address, else `run_dir` itself.

    Raises ConfigError for an address that is wrong, ResourceError if its library is missing.
    """
    if run_dir is None or not is_address(run_dir):
        return run_dir
    check_library("run_dir", run_dir)
    address = check_address("run_dir", run_dir)
    return str(Path("runs") / f"{address.rpartition('/')[2]}-{hashlib.sha256(address.encode()).hexdigest()[:6]}")


def take_remote(run_dir: str, *, resume: bool) -> None:
    """Prove that the address `run_dir` can be used, and for a resume download the files of its run into `directory_of(run_dir)`.

    This happens in another process, because the libraries start threads and this process may fork workers.

    Raises ConfigError if the storage refuses, or holds a run although `resume` is false, ResourceError if it does not answer.
    """
    command = [sys.executable, "-m", __name__, json.dumps({"run_dir": run_dir, "resume": resume})]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        kind = BY_EXIT_CODE.get(ended.returncode, DistributedError)
        raise kind(ended.stdout.decode(errors="replace").strip() or f"run_dir={run_dir!r} could not be opened")


def record_checkpoints(path: Path, address: str, *, keep_latest_k: int, keep_best: bool) -> None:
    """Write into the run directory `path` where its checkpoints are copied to, for `upload_rest`."""
    kept = {"keep_latest_k": keep_latest_k, "keep_best": keep_best}
    replace_text(path / REMOTE, json.dumps({**_record(path), "checkpoints": address, **kept}) + "\n")


def addresses_of(path: Path) -> list[str]:
    """Return the addresses in object storage that have copies of the run directory `path` or of its checkpoints."""
    record = _record(path)
    return [str(record[name]) for name in ("address", "checkpoints") if record.get(name)]


def upload_rest(path: Path) -> str:
    """Upload the checkpoints of the run at `path` that a failure has left behind. Return "" or why this failed."""
    problems: list[str] = []
    for directory in (path, *path.glob("fit-*")):
        record = _record(directory)
        if address := record.get("checkpoints"):
            files = CheckpointDirectory(directory / _CHECKPOINTS, problems.append)
            mirror = Mirror(
                Objects(str(address)), files, keep_latest_k=int(record["keep_latest_k"]), keep_best=bool(record["keep_best"]),
                warn=lambda text: None,
            )  # fmt: skip
            if problem := mirror.drain():
                problems.append(f"{UPLOAD_FAILED} {address}: {problem}")
    return "; ".join(problems)


def push_at_end(path: Path) -> str:
    """Upload what has changed in the run directory `path`, if it has a copy. Return "" or why this failed."""
    remote = RemoteRun.of(path)
    if remote is None:
        return ""
    try:
        remote.push()
    except OSError as error:
        return f"the run directory {path} could not be copied to {remote.address}: {error}"
    return ""


def _take(run_dir: str, resume: bool) -> None:
    address, directory = check_address("run_dir", run_dir), Path(str(directory_of(run_dir)))
    objects = Objects(address)
    RunDirectory(directory).check_idle()
    objects.probe("run_dir", _say)
    # Hidden files are those of a probe or an upload that was cut off.
    sizes = {name: size for name, size in objects.sizes().items() if name and not Path(name).name.startswith(".")}
    if sizes and not resume:
        raise ConfigError(
            f"run_dir={run_dir!r} is not empty: add --resume to continue its run, or name another with --run-dir"
        )
    directory.mkdir(parents=True, exist_ok=True)
    journal = directory / _JOURNAL
    # The journal only grows, so the longer one is the newer one.
    if resume and sizes.get(_JOURNAL, 0) > (journal.stat().st_size if journal.exists() else -1):
        # The journal comes last, so that the next download is not skipped if this one is interrupted.
        for name in sorted(sizes, key=lambda name: (name == _JOURNAL, name)):
            if _CHECKPOINTS not in Path(name).parts and not name.endswith("/"):
                _download(objects, name, directory)
    replace_text(directory / REMOTE, json.dumps({**_record(directory), "address": address}) + "\n")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _record(directory: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(directory / REMOTE, MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _download(objects: Objects, name: str, directory: Path) -> None:
    target = directory / name
    if ".." in target.parts or not target.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{objects.address} has a file {name!r}, which would lie outside of {directory}: remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    stage = target.with_name(f".{target.name}.tmp")
    objects.get(name, stage)
    stage.replace(target)


def _files(path: Path) -> list[tuple[str, Path]]:
    """Return (name, path) of the files of a run, without checkpoints, hidden files and the record of the address."""
    found = []
    for directory, folders, names in os.walk(path):
        folders[:] = sorted(each for each in folders if each != _CHECKPOINTS and not each.startswith("."))
        for name in sorted(names):
            file = Path(directory, name)
            if not name.startswith(".") and name != REMOTE and file.is_file() and not file.is_symlink():
                found.append((file.relative_to(path).as_posix(), file))
    return found


def _main(text: str) -> int:
    asked: dict[str, Any] = json.loads(text)
    try:
        _take(asked["run_dir"], asked["resume"])
    except DistributedError as error:
        sys.stdout.write(str(error))
        return error.exit_code
    except OSError as error:
        sys.stdout.write(f"run_dir={asked['run_dir']!r} cannot be used: {error}")
        return unusable("", error).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
