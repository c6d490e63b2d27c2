"""Temporary directories with mode 0700. If their owner was killed, the next start of the same user removes them.

The owner is a process. The directory records the id and the start time of the process, because process ids are reused. This module
reads /proc itself for the id of the boot and the pid namespace, which psutil does not have (see also `processes`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distributed.runs.processes import FIRST_NAMESPACES, identity_of
from distributed.runs.shared_memory import MEMORY, remove_shared_memory

_PREFIXES = ("distributed-", "ray-")
_OWNER = "owner"
_MACHINE_ID = Path("/etc/machine-id")
_OWNER_BYTES = 256
_DEATH_S = 1.0  # time for killed processes to end


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Yield an empty directory with mode 0700, which is removed at the end of the `with` block.

    Shared memory of processes that were marked in it, and were killed, is removed as well (see `shared_memory`).
    """
    path = claim(Path(tempfile.gettempdir(), f"distributed-{secrets.token_hex(4)}"))
    try:
        (path / "files").mkdir(mode=0o700)
        yield path / "files"
    finally:
        try:
            remove_shared_memory(path / "files", _DEATH_S)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def claim(path: Path, owner: int | None = None) -> Path:
    """Create the directory `path` with mode 0700. Its owner is the process with the id `owner`, by default this process.

    Remove leftovers in the parent directory first.
    """
    remove_leftovers(path.parent)
    path.mkdir(mode=0o700)
    (path / _OWNER).write_text(f"{identity_of(os.getpid() if owner is None else owner) or ''} {_machine() or '-'}")
    return path


def release(path: Path) -> None:
    """Remove a directory that `claim` made for this process. Do nothing if another process owns it, or if there is none."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            is_own = _owner(fd).rpartition(" ")[0] == identity_of(os.getpid())
        finally:
            os.close(fd)
        if is_own:
            shutil.rmtree(path, ignore_errors=True)


def memory_of(run_dir: str | os.PathLike[str]) -> Path:
    """Return the directory, in the memory of this machine, for the snapshots of the launch that has locked `run_dir`."""
    name = hashlib.sha256(os.fsencode(os.path.abspath(run_dir))).hexdigest()[:16]
    return MEMORY / f"distributed-{name}"


def remove_leftovers(directory: str | os.PathLike[str]) -> None:
    """Remove the directories in `directory` that were made by `claim` in a process of this user that has ended."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIXES):
                with contextlib.suppress(OSError):  # the directory belongs to another user, or another process is removing it
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    """Remove the directory `path` if it belongs to this user and the process that owned it has ended."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        is_own = found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700
        if not is_own or not _has_ended(_owner(fd)):
            return
        remove_shared_memory(Path(path, "files"))
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, ignore_errors=True, dir_fd=fd)  # rmtree does not follow links
                elif entry.name != _OWNER:
                    os.unlink(entry.name, dir_fd=fd)
        os.unlink(_OWNER, dir_fd=fd)  # removed last, so that an interrupted removal can be repeated
    finally:
        os.close(fd)
    Path(path).rmdir()


def _owner(directory_fd: int) -> str:
    fd = os.open(_OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
    try:
        return os.read(fd, _OWNER_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def _machine() -> str | None:
    """Return a digest that identifies this machine and stays the same after a reboot. None if there is no such digest.

    The digest covers the machine id (machine-id(5)) and the host name, because machines that boot the same image may have the
    same machine id. Return None in a container, because containers on several machines may have the same id and name. Leftovers
    of a container from before a reboot are therefore never removed.
    """
    try:
        machine_id, namespace = _MACHINE_ID.read_text().strip(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    if namespace != FIRST_NAMESPACES["pid"] or re.fullmatch("[0-9a-f]{32}", machine_id) is None:
        return None
    return hashlib.sha256(f"{machine_id} {os.uname().nodename}".encode()).hexdigest()


def _has_ended(owner: str) -> bool:
    """Return whether the process that `owner` identifies has ended. Return False if that cannot be determined.

    The end of a process can be determined if it belongs to this boot and pid namespace, or to an earlier boot of this machine.
    """
    identity, _, machine = owner.rpartition(" ")
    fields, here = identity.split(" "), identity_of(os.getpid())
    if here is None or len(fields) != 4 or not fields[2].isdecimal():
        return False
    boot, namespace, _, _ = here.split(" ")
    if fields[0] != boot:
        return machine == _machine()
    return fields[1] == namespace and identity_of(int(fields[2])) != identity
