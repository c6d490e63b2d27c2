"""Find the loader processes of the workers of a node, ask them for their stacks, and decide for which one a worker waits.

A loader process opens a file in memory whose name has its process id and its number, and /proc shows this name. Other processes that
a worker has started get no signal, because the signal would end those that do not handle it. Linux only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distributed.launching.heartbeat import STACKS_SIGNAL
from distributed.launching.stacks import ProcessStacks, collect, passes_batches
from distributed.runs.processes import descendants, handles

_NAME = "distributed-loader"
_LINK = re.compile(rf"/memfd:{_NAME}-(\d+)-(\d+)\b")


class LoaderProcess(NamedTuple):
    """A loader process of a worker."""

    number: int  # its number among the processes of its loader, from 0
    process: ProcessStacks


class WorkerStacks(NamedTuple):
    """The stacks of a worker and of its loader processes."""

    process: ProcessStacks
    loaders: Sequence[LoaderProcess]


def stacks_of_workers(
    fds: Mapping[int, int], pids: Mapping[int, int], ask: Callable[[], None]
) -> dict[int, WorkerStacks]:
    """Return the stacks of workers of this node and of their loader processes. The arguments are those of `collect`."""
    stacks, loaders = collect(fds, pids, ask), collect_of_loaders(pids)
    return {key: WorkerStacks(ProcessStacks.of(pid, stacks[key]), loaders[key]) for key, pid in pids.items()}


def join_as_loader(number: int) -> None:
    """Make this process the loader process `number` of its rank. It then writes its stacks on request. Called in the process itself."""
    if hasattr(os, "memfd_create"):  # Linux; not in each Python
        memory = os.memfd_create(f"{_NAME}-{os.getpid()}-{number}")
        faulthandler.register(STACKS_SIGNAL, memory, all_threads=True)


def collect_of_loaders(pids: Mapping[int, int]) -> dict[int, list[LoaderProcess]]:
    """Ask the loader processes of workers for their stacks, and return them by the keys of the workers.

    `pids` has the process ids of the workers, 0 for one that has not begun.
    """
    children = {worker: descendants(pid) if pid else [] for worker, pid in pids.items()}
    files = {each: file for found in children.values() for each in found if (file := _open(each)) is not None}
    # The user's code may have reset the handler.
    fds = {pid: fd for pid, (_, fd) in files.items() if handles(pid, STACKS_SIGNAL)}
    stacks = collect(fds, {pid: pid for pid in fds}, lambda: _ask(fds))
    for _, fd in files.values():
        os.close(fd)
    return {
        worker: [
            LoaderProcess(number, ProcessStacks.of(pid, stacks.get(pid, "")))
            for number, pid in sorted((files[pid][0], pid) for pid in found if pid in files)
        ]
        for worker, found in children.items()
    }


def awaited(worker: WorkerStacks) -> LoaderProcess | None:
    """Return the loader process for which a worker waits, or None if it does not wait for one or if that is not known.

    A loader process that is stopped comes before one that reads.
    """
    if not passes_batches(worker.process.stacks):
        return None
    silent = [each for each in worker.loaders if each.process.why_silent]
    reading = [each for each in worker.loaders if each.process.stacks and not passes_batches(each.process.stacks)]
    return next(iter([*silent, *reading]), None)


def _open(pid: int) -> tuple[int, int] | None:
    """Return the number of loader process `pid` and a descriptor of its file, or None for any other process.

    A process that a loader process has forked has the file too, but another process id.
    """
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        for link in Path(f"/proc/{pid}/fd").iterdir():
            known = _LINK.match(_target(link))
            if known is not None and int(known[1]) == pid:
                return int(known[2]), os.open(link, os.O_RDONLY)
    return None


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):  # the process has closed the file
        return str(link.readlink())
    return ""


def _ask(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
