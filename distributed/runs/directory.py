"""The run directory: its name, whether it can be used, who uses it, and its journal of events."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import glob
import json
import os
import re
import secrets
import sys
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed.config.json_lines import JOURNAL, JOURNAL_MEMORY, Memory, json_lines
from distributed.config.kinds import COUNT, SECONDS, TEXT, Kind, check_kinds, optional
from distributed.config.reading import LimitError, open_regular
from distributed.errors import ConfigError, ResourceError
from distributed.runs.failures import last_failure_of
from distributed.runs.processes import is_running

_PROBE_BYTES = 64 * 1024  # more than the text files of a run need before the first checkpoint
_LOCK = ".lock"
_LOCK_BYTES = 4096  # more than the text in a lock file
_PART = ".part"  # file in the directory of a node other than node 0
REMOTE = "remote.json"  # file with the address of the copy of the directory in object storage, if there is one
JOB = "job"  # directory of the files for a scheduler, written before the run
LEARNING_RATE = "learning-rate"  # directory of a learning-rate finder in the run directory; further ones get a number
_EVENT = {
    "event": TEXT, "time": SECONDS, "step": COUNT, "checkpoint": TEXT, "cause": optional(TEXT),
    "traceback": optional(TEXT), "after": optional(TEXT), "rank": optional(COUNT), "in_step": COUNT,
    "kind": TEXT, "phase": TEXT, "place": TEXT, "then": TEXT, "directory": TEXT, "restart_count": COUNT,
    "micro_batch": COUNT, "fit": COUNT,
    "node": optional(Kind("a number or a name", lambda value: isinstance(value, (int, str)))),
}  # fmt: skip
_DYING_S = 5.0  # seconds that workers may take to end after their launcher was killed


def is_below(path: Path, directory: Path) -> bool:
    """Return whether `path` is an existing file below `directory`, with all links followed."""
    return path.is_file() and path.resolve().is_relative_to(directory.resolve())


def script_name() -> str:
    """Return the file name of the running script, or `notebook`."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return name if name.endswith(".py") and "ipykernel" not in name else "notebook"


def choose_run_dir(script_name: str, run_id: str | None = None) -> Path:
    """Return a fresh name `runs/<script>-<time>-<id>`, relative to the working directory. Creates nothing."""
    return Path("runs") / f"{_stem(script_name)}-{time.strftime('%Y%m%d-%H%M%S')}-{run_id or secrets.token_hex(2)}"


def find_run_dir(script_name: str, run_id: str) -> Path | None:
    """Return the newest directory that `choose_run_dir` named for this script and `run_id`, or None."""
    pattern = f"{glob.escape(_stem(script_name))}-{'[0-9]' * 8}-{'[0-9]' * 6}-{run_id}"
    return max(Path("runs").glob(pattern), default=None)


def _stem(script_name: str) -> str:
    return Path(script_name).stem or "run"


class RunDirectory:
    """The files of one run under `path`. Creating an instance is cheap and creates no file."""

    def __init__(self, path: str | os.PathLike[str], name: str = "run directory", flag: str = "--run-dir") -> None:
        self.path = Path(path)
        self._name, self._flag = name, flag  # names of the setting and its flag, for messages
        self._lock_fd: int | None = None

    @property
    def logs(self) -> Path:
        """The directory with the output of each rank."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The file with one JSON object per logged event."""
        return self.path / "metrics.jsonl"

    @property
    def times(self) -> Path:
        """The file with one JSON object per log line: the seconds of each part of an update."""
        return self.path / "times.jsonl"

    @property
    def media(self) -> Path:
        """The file with one JSON object per image, text or the like that was logged."""
        return self.path / "media.jsonl"

    @property
    def events(self) -> Path:
        """The file with one JSON object per event of the run."""
        return self.path / "events.jsonl"

    def check(self, *, resume: bool) -> None:
        """Create the directory and prove that it can be used. Launcher only.

        Raises:
            ConfigError: the path is not a directory or cannot be written, the disk is full, or the directory holds an earlier
                run and `resume` is false.
            ResourceError: a live run holds the directory.
        """
        self._create()
        if holder := self.live_holder():
            raise self._in_use(holder)
        if not resume and self._names() - {_LOCK}:
            raise ConfigError(
                f"{self._name} {str(self.path)!r} is not empty:"
                f" add --resume to continue its run, or name another with {self._flag}"
            )
        self._prove_writable()

    def prove(self) -> None:
        """Create the directory and prove that it can be written. Raises ConfigError if it cannot."""
        self._create()
        self._prove_writable()

    def prove_part(self, whose: str) -> None:
        """Create the directory of a node other than node 0, and prove that it can be written. Raises ConfigError if it cannot.

        Unless the node shares the directory of node 0, write `whose` into a file and lock this file until this process ends (see
        `part_of` and `part_holder`).
        """
        self.prove()
        if (self.path / _LOCK).exists():
            return
        fd = self._lock_fd = os.open(self.path / _PART, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        with contextlib.suppress(OSError):  # the previous launcher may not have ended yet
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, f"{whose}\n{_this_process()}\n".encode())

    @property
    def part_of(self) -> str:
        """Return the text of `prove_part`, which names the node, or "" if this is the directory of the run itself."""
        if (self.path / _LOCK).exists():
            return ""
        try:
            return _text_of(self.path / _PART).partition("\n")[0]
        except (OSError, LimitError):
            return ""

    def part_holder(self) -> str:
        """Return who has locked the directory of a node other than node 0, or "" if nobody has (see `prove_part`)."""
        return _holder_of(self.path / _PART)

    def check_idle(self) -> None:
        """Raise ResourceError if a live run holds the directory."""
        if holder := self.live_holder():
            raise self._in_use(holder)

    @property
    def was_locked(self) -> bool:
        """Return whether a run has ever locked the directory."""
        return (self.path / _LOCK).exists()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock of a run that has ended during the `with` block, without changing a file.

        Raises ResourceError if a live run holds it.
        """
        try:
            fd = os.open(self.path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            yield
            return
        try:
            if holder := _take(fd):
                raise self._in_use(holder)
            yield
        finally:
            os.close(fd)

    def lock(self) -> None:
        """Lock the directory until this process and all processes that it forks have ended.

        Raises ResourceError if another run holds it.
        """
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        if holder := _take(fd):
            os.close(fd)
            raise self._in_use(holder)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{_this_process()}\n".encode(), 0)
        self._lock_fd = fd

    def unlock(self) -> None:
        """Release the directory."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def holder(self) -> str:
        """Return who has locked the directory, without waiting and without touching the lock, or "" if nobody has.

        A process on another machine is returned even if it has ended, because its end cannot be seen from here.
        """
        return _holder_of(self.path / _LOCK)

    def live_holder(self) -> str:
        """Return who holds the lock, or "" if nobody does. Take the lock for a moment to find out."""
        try:
            fd = os.open(self.path / _LOCK, os.O_RDONLY)
        except OSError:
            return ""
        try:
            return _take(fd)
        finally:
            os.close(fd)

    def event(self, name: str, **detail: Any) -> None:
        """Append one line to events.jsonl with a single write, so that lines of several processes never mix."""
        line = json.dumps({"time": time.time(), "event": name, **detail}) + "\n"
        with contextlib.suppress(OSError):  # with a full disk, lines are lost, but the run goes on
            fd = os.open(self.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)

    def read_events(self, begin: int = 0, end: int | None = None) -> list[dict[str, Any]]:
        """Return the events from byte `begin` of the file to `end`, oldest first.

        Other lines are ignored, such as one that a killed writer left incomplete. Raises ConfigError if the file is beyond a limit.
        """
        memory = Memory(JOURNAL_MEMORY)
        try:
            return [memory.take(line) for line in json_lines(self.events, JOURNAL, begin, end) if _is_event(line)]
        except FileNotFoundError:
            return []
        except LimitError as error:
            raise ConfigError(f"{str(self.events)!r} {error}: move it away") from None

    def events_size(self) -> int:
        """Return the size of events.jsonl in bytes, to pass to a later `read_events`."""
        return self.events.stat().st_size if self.events.exists() else 0

    def last_failure(self, begin: int) -> dict[str, Any] | None:
        """Return the event with the cause of the newest attempt that failed, or None. Read the journal from byte `begin` on."""
        return last_failure_of(self.read_events(begin))

    def largest_micro_batch(self, fit: int) -> int:
        """Return the most samples per micro-batch with which the fit number `fit` fits into memory, or 0 if there is no limit."""
        events = [event for event in self.read_events() if event.get("fit") == fit]
        return min((each["micro_batch"] for each in events if "micro_batch" in each), default=0)

    def has_gone_on(self, checkpoint: str) -> bool:
        """Return whether a launch has gone on from `checkpoint`, at which a callback had stopped the run, since it was saved."""
        events = [event for event in self.read_events() if event.get("checkpoint") == checkpoint]
        decisive = [event for event in events if event["event"] == "checkpoint_saved" or "after" in event]
        return bool(decisive) and "after" in decisive[-1]

    def check_resumable(self) -> None:
        """Raise ConfigError if the directory does not exist, or holds files but none of a run.

        An empty directory is accepted: it belongs to an attempt that ended before it wrote anything, or was created so
        that a scheduler can repeat one command with `--resume` from the first attempt on.
        """
        if not self.path.exists():
            raise ConfigError(
                f"{self._name} {str(self.path)!r} does not exist, but --resume continues an existing run{self._nearest_run()}: correct"
                f" {self._flag}, or drop --resume to start a new run; if every attempt passes --resume, as in a job script, make the directory first"
            )
        names = self._names()
        if names and not names & {_LOCK, self.events.name, self.checkpoints.name}:
            inside = max((events.parent for events in self.path.glob(f"*/{self.events.name}")), default=None)
            hint = f"did you mean {str(inside)!r}? Name" if inside is not None else "name"
            raise ConfigError(
                f"{self._name} {str(self.path)!r} holds no run to resume: {hint} the run itself with {self._flag}"
            )

    def _nearest_run(self) -> str:
        """Return a phrase for a message with a run of a similar name beside this directory or under `runs`, or ""."""
        parents = [parent for parent in (self.path.parent, Path("runs")) if parent.is_dir()]
        runs = {each.name: each for parent in parents for each in parent.iterdir() if (each / self.events.name).exists()}
        close = difflib.get_close_matches(self.path.name, runs, n=1, cutoff=0.6)
        return f" (did you mean {str(runs[close[0]])!r}?)" if close else ""

    def _names(self) -> set[str]:
        """Return the names in the directory, without those that may exist before the run, such as `learning-rate`."""
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        return {name for name in names if name not in (REMOTE, _PART) and not re.fullmatch(rf"{JOB}|{LEARNING_RATE}(-\d+)?", name)}

    def _create(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"{self._name} {str(self.path)!r} is not a directory: name another with {self._flag}"
            ) from None
        except OSError as error:
            raise self._unusable(error) from None

    def _prove_writable(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            with open(probe, "wb") as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(error) from None
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()

    def _unusable(self, error: OSError) -> ConfigError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.path if self.path.exists() else self.path.parent).free
            return ConfigError(
                f"{self._name} {str(self.path)!r} is full: {_PROBE_BYTES} bytes needed, {free} free:"
                f" free some space or name another with {self._flag}"
            )
        return ConfigError(
            f"{self._name} {str(self.path)!r} cannot be written ({error.strerror}): name another with {self._flag}"
        )

    def _in_use(self, holder: str) -> ResourceError:
        return ResourceError(
            f"{self._name} {str(self.path)!r} is in use by {holder}: stop that, or name another with {self._flag}"
        )


def _is_event(line: Any) -> bool:
    try:
        check_kinds(line, _EVENT)
    except ValueError:
        return False
    return "event" in line and "time" in line


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _text_of(file: Path) -> str:
    """Return the text of a lock file. Raises OSError if it cannot be opened, LimitError if it is not a regular file."""
    with open_regular(file) as opened:
        return opened.read(_LOCK_BYTES).decode(errors="replace")


def _holder_of(file: Path) -> str:
    """Return the process that the last line of a lock file names, or "" if the file is missing or that process has released it.

    The release is only known for a process on this machine.
    """
    try:
        text = _text_of(file).strip().rpartition("\n")[2]
        inode = file.stat().st_ino
    except (OSError, LimitError):
        return ""
    if not re.fullmatch(rf"process \d+ on {re.escape(socket.gethostname())}", text):
        return text
    try:
        locked = re.findall(r"FLOCK .*:(\d+) 0 EOF", Path("/proc/locks").read_text())
    except OSError:  # not Linux
        return "" if _is_dead(text) else text
    return text if str(inode) in locked else ""


def _take(fd: int) -> str:
    """Lock the open file and return "", or return who holds the lock.

    Wait for some seconds if the launcher that took the lock was just killed, because its workers may still be ending.
    """
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ""
        except BlockingIOError:
            holder = os.pread(fd, 256, 0).decode(errors="replace").strip() or "another process"
            if not _is_dead(holder) or time.monotonic() > deadline:
                return holder
            time.sleep(0.02)


def _is_dead(holder: str) -> bool:
    """Return whether `holder`, a text that `lock` wrote, names a process of this machine that has ended."""
    found = re.fullmatch(rf"process (\d+) on {re.escape(socket.gethostname())}", holder)
    return found is not None and not is_running(int(found[1]))
