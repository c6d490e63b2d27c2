"""Create and check directories whose files are run as code, such as compiler caches. No other user may write there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_WRITABLE, _BY_EVERYBODY, _BY_GROUP = stat.S_IWGRP | stat.S_IWOTH, stat.S_IWOTH, stat.S_IWGRP


def own_directory(path: Path) -> str | None:
    """Create the directory `path` and its missing parents with mode 0700, if it does not exist.

    Return a short reason why its content may come from another user, or None if it can only come from this user or root. An
    existing empty directory of this user gets mode 0700 and then counts as a new one.
    """
    try:
        _make(path)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not os.listdir(path):
            path.chmod(0o700)
    except OSError as error:
        return f"it cannot be used ({error.strerror})"
    return stranger(path)


def stranger(path: Path) -> str | None:
    """Return why the content of the directory `path` can come from a user other than this user and root, or None."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            return "it is a link"
        if found.st_uid != os.geteuid():
            return "it belongs to another user"
        if found.st_mode & _WRITABLE:
            return "other users can write there"
        return _above(path) or _below(path, found.st_mode)
    except OSError as error:
        return f"it cannot be used ({error.strerror})"


def cache_home() -> Path:
    """Return this package's directory in the user's cache. Raises RuntimeError if the user has no home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distributed-trainer"


def _make(path: Path) -> None:
    for parent in [*reversed(path.parents), path]:
        if not os.path.lexists(parent):
            with contextlib.suppress(FileExistsError):  # another rank has created it first
                parent.mkdir(mode=0o700)


def _above(path: Path) -> str | None:
    """Return why another user could replace the directory by another one, or None."""
    for parent in {*path.absolute().parents, *path.resolve().parents}:
        found = parent.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{parent} belongs to another user"
        is_open = found.st_mode & _WRITABLE and not found.st_mode & stat.S_ISVTX
        if is_open and not stat.S_ISLNK(found.st_mode):
            return f"other users can move files in {parent}"
    return None


def _below(path: Path, mode: int) -> str | None:
    """Return why an entry of the directory could come from another user, or None."""
    unwanted = _BY_EVERYBODY | (_BY_GROUP if mode & stat.S_IXGRP else 0)
    for entry in _entries(path):
        with contextlib.suppress(FileNotFoundError):  # a file that another rank renames
            found = entry.stat(follow_symlinks=False)
            if found.st_uid not in (0, os.geteuid()):
                return f"{entry.path} belongs to another user"
            if found.st_mode & unwanted and not entry.is_symlink():
                return f"other users can write to {entry.path}"
    return None


def _entries(path: str | Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path)
