"""Runs inside each other: who works in a directory above or below that of a run, and which other runs are below it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from distributed.runs.directory import LEARNING_RATE, RunDirectory
from distributed.runs.summary import is_training, readable_result

_LEVELS_ABOVE = 4  # RUN/fit-2 is one level below a lock, SWEEP/trials/00000/fit-2 is three
_PART = re.compile(rf"fit-\d+|{LEARNING_RATE}(-\d+)?")
_HOLDER = re.compile(r"process \d+ on \S+")  # another program may have a .lock of its own


def holder_of(path: Path) -> str:
    """Return who has locked the run at `path`, or "" if nobody has.

    If the run has no lock of its own, the lock of the nearest directory above it counts.
    """
    run = RunDirectory(path)
    holder = run.holder()
    # A trial of a sweep has its own lock, because it may have been killed while the sweep goes on.
    if holder or (run.was_locked and not _PART.fullmatch(path.name)):
        return holder
    return next((holder for _, holder in _holders_above(path)), "")


def worker_above(path: Path) -> tuple[Path, str] | None:
    """Return the nearest directory above `path` in which a process works, and that process, or None.

    A process on another machine counts unless the directory is that of a run that has ended.
    """
    for directory, holder in _holders_above(path):
        run = RunDirectory(directory)
        has_ended = readable_result(directory / "result.json") is not None and not is_training(run)
        if run.live_holder() or not has_ended:
            return directory, holder
    return None


def worker_below(path: Path) -> tuple[Path, str] | None:
    """Return a directory below `path` in which a process works, and that process, or None."""
    for directory in _directories_below(path, ".lock"):
        run = RunDirectory(directory)
        # Only a result.json tells whether a process on another machine goes on.
        if holder := run.live_holder() or (run.holder() if is_training(run) else ""):
            return directory, holder
    return None


def other_run_below(path: Path) -> Path | None:
    """Return a run below the directory of the run `path` that is no part of that run, or None."""
    for directory in _directories_below(path, "events.jsonl"):
        if not all(_PART.fullmatch(name) for name in directory.relative_to(path).parts):
            return directory
    return None


def _holders_above(path: Path) -> Iterator[tuple[Path, str]]:
    for directory in path.resolve().parents[:_LEVELS_ABOVE]:
        holder = RunDirectory(directory).holder()
        if _HOLDER.fullmatch(holder):
            yield directory, holder


def _directories_below(path: Path, name: str) -> Iterator[Path]:
    """Yield the directories below `path` that hold a file `name`. Links are not followed."""
    for directory, _, names in os.walk(path):
        found = Path(directory)
        if name in names and found != path and not (found / name).is_symlink():
            yield found
