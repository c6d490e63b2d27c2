"""Delete the directories of runs that have ended, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from distributed.errors import ConfigError, ResourceError
from distributed.runs.directory import RunDirectory
from distributed.runs.listing import RunState
from distributed.runs.nested import other_run_below, worker_above, worker_below
from distributed.runs.recorded import read_recorded
from distributed.runs.remote import addresses_of
from distributed.runs.summary import is_training

# A directory with one of these files counts as a run. They are deleted last, so that an interrupted deletion can be repeated.
_LAST = ("config.yaml", "result.json", "events.jsonl", ".lock")


def check_deletable(state: RunState) -> None:
    """Raise an error if the run may not be deleted.

    Raises:
        ConfigError: the path is a link, holds no journal of a run, or holds the current directory or another run.
        ResourceError: the run is still going on, or a process works in a directory above or below its own.
    """
    path, run = state.path, RunDirectory(state.path)
    if path.is_symlink():
        raise ConfigError(f"{str(path)!r} is a link and is not deleted: name the run itself, {str(path.resolve())!r}")
    if not run.read_events():
        raise ConfigError(f"{str(path)!r} has no events.jsonl of a run and is not deleted: remove it by hand")
    if Path.cwd().is_relative_to(path.resolve()):
        raise ConfigError(f"{str(path)!r} holds the current directory and is not deleted: change the directory first")
    if not state.is_over or (run.holder() and is_training(run)):
        where = f" on {state.host}" if state.host else ""
        raise ResourceError(f"run {str(path)!r} is {state.status}{where} and is not deleted: stop it first")
    run.check_idle()
    _check_nested(path)


def _check_nested(path: Path) -> None:
    if above := worker_above(path):
        directory, holder = above
        raise ResourceError(
            f"{str(path)!r} is not deleted: {holder} works in {str(directory)!r}, which contains this run: stop that process first"
        )
    if below := worker_below(path):
        directory, holder = below
        raise ResourceError(
            f"{str(path)!r} is not deleted: {holder} works in {str(directory)!r} inside it: stop that first"
        )
    if (other := other_run_below(path)) is not None:
        raise ConfigError(
            f"{str(path)!r} holds another run, {str(other)!r}, and is not deleted: move or delete that one first"
        )


def delete_run(state: RunState) -> None:
    """Delete the directory of a run with its checkpoints. Links in it are removed, but not their targets.

    Raises the errors of `check_deletable`, and ConfigError if a file cannot be removed.
    """
    check_deletable(state)
    with RunDirectory(state.path).held():
        try:
            _empty(state.path)
            state.path.rmdir()
        except OSError as error:
            raise ConfigError(
                f"{error.filename or state.path} in {str(state.path)!r} cannot be removed ({error.strerror}): check its permissions"
            ) from None


def _empty(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        with os.scandir(fd) as entries:
            found = sorted(entries, key=lambda entry: _LAST.index(entry.name) if entry.name in _LAST else -1)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, dir_fd=fd)  # rmtree does not follow links
            else:
                os.unlink(entry.name, dir_fd=fd)
    finally:
        os.close(fd)


def size_of(path: Path) -> int:
    """Return the total size of the files below `path` in bytes. Links are not followed."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # the file has just been removed
                total += os.lstat(os.path.join(directory, name)).st_size  # noqa: PTH118  os.walk yields texts
    return total


def kept_elsewhere(path: Path) -> list[str]:
    """Return the directories and addresses outside of the run directory `path` that have checkpoints or other files of the run."""
    recorded = read_recorded(path / "config.yaml")
    found = addresses_of(path)
    for name in ("checkpoint_dir", "tensorboard_dir"):
        address = recorded.get(name)
        if not isinstance(address, str) or not Path(address).exists():  # `exists` is false for a text that is no path
            continue
        if not Path(address).resolve().is_relative_to(path.resolve()):
            found.append(str(address))
    return found
