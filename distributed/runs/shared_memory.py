"""Remove the shared memory of processes that were killed while they made a tensor which other processes read.

Workaround (torch 2.13, no upstream issue known; may go when torch makes such memory without a name): torch creates a file in /dev/shm,
whose name has its process id, and removes it from there some microseconds later. If the process is killed in between, the file stays.
Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from distributed.runs.processes import FIRST_NAMESPACES, identity_of

MEMORY = Path("/dev/shm")  # a file system of Linux in memory
_MARK = re.compile(r"process-(\d+)")
_FILE = re.compile(r"torch_(\d+)_\d+(_\d+)?")
_directory: str | None = None  # with the marks of this process and its children


def mark_process(directory: str | None) -> None:
    """Let `remove_shared_memory(directory)` find this process if it is killed. Do nothing for None.

    The mark is a file with the process id in its name and the identity of the process. It goes at the end of the process.
    """
    global _directory
    _directory = directory
    identity = identity_of(os.getpid())
    if directory is None or identity is None:
        return
    from multiprocessing.util import Finalize  # not needed by launchers

    mark = Path(directory, f"process-{os.getpid()}")
    with contextlib.suppress(OSError):  # the disk is full, or the launcher was killed and another one has removed the directory
        mark.write_text(identity)
    Finalize(None, _remove, (mark,), exitpriority=-100)  # in a child of `multiprocessing` too, after its other finalizers


def mark_directory() -> str | None:
    """Return the directory in which this process was marked, for its children. None without a launcher that removes what they leave."""
    return _directory


def remove_shared_memory(directory: Path, patience_s: float = 0.0) -> None:
    """Remove the shared memory of processes that were marked in `directory` and have ended, at most `patience_s` later.

    Process ids are unique in one process namespace only, so a file must also be newer than the mark and belong to this user.
    """
    marks = _marks(directory)
    deadline = time.monotonic() + patience_s
    while (running := {pid for pid, identity in marks.items() if _is_running(pid, identity)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    # If another process has the same id now, the files may be its own.
    here = _place(identity_of(os.getpid()) or "")
    ended = [pid for pid, identity in marks.items() if identity_of(pid) is None and _place(identity) == here]
    if ended and _are_ids_unique():
        with contextlib.suppress(OSError):  # no such memory
            for file in MEMORY.iterdir():
                known = _FILE.fullmatch(file.name)
                if known is not None and int(known[1]) in ended:
                    _remove_if_newer(file, directory / f"process-{known[1]}")
    for pid in marks.keys() - running:
        _remove(directory / f"process-{pid}")


def _marks(directory: Path) -> dict[int, str]:
    """Return the ids and the identities of the processes that were marked in a directory."""
    marks = {}
    with contextlib.suppress(OSError):  # the user has removed the directory
        for path in directory.iterdir():
            with contextlib.suppress(OSError):  # the process ends
                if (known := _MARK.fullmatch(path.name)) is not None:
                    marks[int(known[1])] = path.read_text()
    return marks


def _is_running(pid: int, identity: str) -> bool:
    return identity_of(pid) == identity


def _place(identity: str) -> str:
    """Return the boot and the pid namespace of a process."""
    return identity.rsplit(" ", 2)[0]


def _are_ids_unique() -> bool:
    """Return False in a container that shares the memory of its host (`docker run --ipc=host`), where others use the same process ids.

    Other ways to share it, such as a common volume at /dev/shm, are not recognized.
    """
    try:
        names = {name: os.readlink(f"/proc/self/ns/{name}") for name in FIRST_NAMESPACES}
    except OSError:  # this system hides them
        return False
    return names["ipc"] != FIRST_NAMESPACES["ipc"] or names["pid"] == FIRST_NAMESPACES["pid"]


def _remove_if_newer(file: Path, mark: Path) -> None:
    with contextlib.suppress(OSError):
        stat = file.lstat()
        if stat.st_uid == os.geteuid() and stat.st_mtime_ns >= mark.stat().st_mtime_ns:
            file.unlink()


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
