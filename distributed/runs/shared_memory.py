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

from distributed.runs.processes import is_running

MEMORY = Path("/dev/shm")  # a file system of Linux in memory
_MARK = re.compile(r"process-(\d+)")
_FILE = re.compile(r"torch_(\d+)_\d+(_\d+)?")
_FIRST_NAMESPACES = {"pid": f"pid:[{0xEFFFFFFC}]", "ipc": f"ipc:[{0xEFFFFFFF}]"}  # Linux: PROC_PID_INIT_INO, PROC_IPC_INIT_INO
_directory: str | None = None  # with the marks of this process and its children


def mark_process(directory: str | None) -> None:
    """Let `remove_shared_memory(directory)` find this process if it is killed. Do nothing for None."""
    global _directory
    _directory = directory
    if directory is not None:
        from multiprocessing.util import Finalize  # not needed by launchers

        mark = Path(directory, f"process-{os.getpid()}")
        with contextlib.suppress(OSError):  # the launcher was killed, and another one has removed the directory
            mark.touch()
        Finalize(None, _remove, (mark,), exitpriority=0)  # at the end of a process of `multiprocessing`


def marks() -> str | None:
    """Return the directory that this process was marked in, for its children. None without a launcher that removes what they leave."""
    return _directory


def remove_shared_memory(directory: str | os.PathLike[str], patience_s: float = 0.0) -> None:
    """Remove the shared memory of processes that were marked in `directory` and have ended, at most `patience_s` later."""
    try:
        names = os.listdir(directory)
    except OSError:  # the user has removed it
        return
    pids = {int(known[1]) for name in names if (known := _MARK.fullmatch(name))}
    deadline = time.monotonic() + patience_s
    while (running := set(filter(is_running, pids))) and time.monotonic() < deadline:
        time.sleep(0.01)
    ended = pids - running
    if ended and _are_ids_unique() and MEMORY.is_dir():
        with os.scandir(MEMORY) as entries:
            for entry in entries:
                known = _FILE.fullmatch(entry.name)
                if known is not None and int(known[1]) in ended:
                    _remove_if_own(Path(entry.path))
    for pid in ended:
        _remove(Path(directory, f"process-{pid}"))


def _are_ids_unique() -> bool:
    """Return whether no other process that uses the same memory can have the same process id.

    Containers may share the memory of their host (`docker run --ipc=host`), and each has process ids of its own.
    """
    names = {name: os.readlink(f"/proc/self/ns/{name}") for name in _FIRST_NAMESPACES}
    return names["ipc"] != _FIRST_NAMESPACES["ipc"] or names["pid"] == _FIRST_NAMESPACES["pid"]


def _remove_if_own(file: Path) -> None:
    with contextlib.suppress(OSError):
        if file.lstat().st_uid == os.geteuid():
            file.unlink()


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
