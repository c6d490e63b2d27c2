"""Directories whose files are run as code, such as the caches of compilers: nobody else may be able to write there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_WRITABLE, _BY_EVERYBODY, _BY_GROUP = stat.S_IWGRP | stat.S_IWOTH, stat.S_IWOTH, stat.S_IWGRP


def own_directory(path: Path) -> str | None:
    """Make the directory `path` if it does not exist, with mode 0700, and so its missing parents.

    Return why its content can come from somebody else, in a few words, or None if it can come from this user (and root) alone.
    An empty directory of this user is closed to others and is then as good as a new one.
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
    """Return why the content of the directory `path` can come from somebody else than this user and root, or None."""
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
    """Return this package's directory in the user's cache. RuntimeError where the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distributed-trainer"


def _make(path: Path) -> None:
    for parent in [*reversed(path.parents), path]:
        if not os.path.lexists(parent):
            with contextlib.suppress(FileExistsError):  # another rank was faster
                parent.mkdir(mode=0o700)


def _above(path: Path) -> str | None:
    """Return why the directory could be replaced by another one, or None."""
    for parent in {*path.absolute().parents, *path.resolve().parents}:
        found = parent.lstat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{parent} belongs to another user"
        is_open = found.st_mode & _WRITABLE and not found.st_mode & stat.S_ISVTX
        if is_open and not stat.S_ISLNK(found.st_mode):
            return f"other users can move files in {parent}"
    return None


def _below(path: Path, mode: int) -> str | None:
    """Return why something in the directory could be from another user, who was able to write there, or None."""
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
