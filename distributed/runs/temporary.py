"""Temporary directories that nobody else can enter, and that the next start removes where their owner was killed.

The owner is a process. It is written into the directory with the time at which it started, as its process id alone may come again.
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

_PREFIXES = ("distributed-", "ray-")
_OWNER = "owner"
_MACHINE_ID = Path("/etc/machine-id")
_FIRST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"  # of processes outside of containers, on every Linux: PROC_PID_INIT_INO
_OWNER_BYTES = 256


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """An empty directory, mode 0700, that is removed at the end."""
    path = claim(Path(tempfile.gettempdir(), f"distributed-{secrets.token_hex(4)}"))
    try:
        (path / "files").mkdir(mode=0o700)
        yield path / "files"
    finally:
        shutil.rmtree(path, ignore_errors=True)


def claim(path: Path) -> Path:
    """Make the directory `path`, mode 0700, as this process' own. Remove what killed processes left beside it."""
    sweep(path.parent)
    path.mkdir(mode=0o700)
    (path / _OWNER).write_text(f"{_identity(os.getpid()) or ''} {_machine() or '-'}")
    return path


def sweep(directory: str | os.PathLike[str]) -> None:
    """Remove the directories below `directory` that `claim` made in a process of this user that has ended."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIXES):
                with contextlib.suppress(OSError):  # not ours, or another process removes it now
                    _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        is_own = found.st_uid == os.geteuid() and found.st_mode & 0o777 == 0o700
        if not is_own or not _has_ended(_owner(fd)):
            return
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.name, ignore_errors=True, dir_fd=fd)  # follows no link
                elif entry.name != _OWNER:
                    os.unlink(entry.name, dir_fd=fd)
        os.unlink(_OWNER, dir_fd=fd)  # the last one: it says whose the rest is
    finally:
        os.close(fd)
    Path(path).rmdir()


def _owner(directory_fd: int) -> str:
    fd = os.open(_OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fd)
    try:
        return os.read(fd, _OWNER_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def _identity(pid: int) -> str | None:
    """What tells process `pid` from every other one of this boot: its namespace, number and start. None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else f"{boot} {namespace} {pid} {fields[19]}"  # proc(5): state, starttime


def _machine() -> str | None:
    """Return what tells this machine from every other one that is running, the same after a reboot; None if nothing does.

    Machines that boot the same image may have one machine id (machine-id(5)), but not one host name too. Containers may have
    both in common, so what they left before a reboot is never removed.
    """
    try:
        machine_id, namespace = _MACHINE_ID.read_text().strip(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
    if namespace != _FIRST_NAMESPACE or re.fullmatch("[0-9a-f]{32}", machine_id) is None:
        return None
    return hashlib.sha256(f"{machine_id} {os.uname().nodename}".encode()).hexdigest()


def _has_ended(owner: str) -> bool:
    """Return whether the process that wrote `owner` has ended. False if that cannot be known from here.

    It is known of a process of the same boot and namespace, and of an earlier boot of this machine.
    """
    identity, _, machine = owner.rpartition(" ")
    fields, here = identity.split(" "), _identity(os.getpid())
    if here is None or len(fields) != 4 or not fields[2].isdecimal():
        return False
    boot, namespace, _, _ = here.split(" ")
    if fields[0] != boot:
        return machine == _machine()
    return fields[1] == namespace and _identity(int(fields[2])) != identity
