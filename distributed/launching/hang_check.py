"""Look for a worker that hangs: name it, and keep the stacks of all workers and loader processes in the run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from distributed.launching.causes import Failure
from distributed.launching.hangs import SLOW, HangWatch, Suspects, culprit
from distributed.launching.heartbeat import Progress, Reports
from distributed.launching.loader_stacks import WorkerStacks, awaited
from distributed.launching.request import LaunchRequest
from distributed.launching.stacks import line_in_script, waits_in
from distributed.runs.directory import RunDirectory
from distributed.runs.failures import STACKS

_MOST_LOCATIONS = 4  # how many ranks are listed with their locations if no single rank is the cause


class HangCheck:
    """Check the workers of each attempt. With several nodes, the launcher of node 0 checks those of all nodes.

    Args:
        request: the request, which has `hang_timeout` and `hang_timeout_slow`.
        run: the run directory, in which the stacks are kept.
        reports: the progress of the workers, by rank.
        inspect: returns the stacks of workers by rank when called with their process ids, or {} if they are not known at the moment.
        node_of: returns the name of the node of a rank, or "" if there is only one node.
        place: what follows the name of the directory with the stacks in messages, if it is not on each node.
    """

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, reports: Reports,
        inspect: Callable[[Mapping[int, int]], Mapping[int, WorkerStacks]], node_of: Callable[[int], str],
        place: str = "",
    ) -> None:  # fmt: skip
        self._request, self._run, self._reports = request, run, reports
        self._inspect, self._node_of, self._place = inspect, node_of, place
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._watch = HangWatch(self._request.hang_timeout or 0.0, self._request.hang_timeout_slow)
        self._looked = time.monotonic()

    def follow(self, ranks: Collection[int]) -> Suspects | None:
        """Look at the progress of the workers `ranks`, and return those that stand still for too long, or None."""
        now = time.monotonic()
        # This process may have been stopped together with the workers, and did not watch them in that time.
        seconds = min(now - self._looked, 2 * self._request.monitor_interval + 1.0)
        self._looked = now
        return self._watch.look({rank: self._reports.progress(rank) for rank in sorted(ranks)}, seconds)

    def find(self, ranks: Collection[int]) -> Failure | None:
        """Return the failure of a worker that hangs, or None. `ranks` are those of all workers that are at work.

        A worker that was found and does not move is found again after as much time as before.
        """
        suspects = self.follow(ranks) if self._request.hang_timeout else None
        if suspects is None:
            return None
        limit, slow = f"hang_timeout={self._request.hang_timeout:g}", self._request.hang_timeout_slow
        if suspects.progress.is_slow:
            limit = f"{SLOW} times {limit}" if slow is None else f"hang_timeout_slow={slow:g}"
        if (found := self._judge(suspects, ranks, limit)) is not None:
            self._watch.forgive()
        return found

    def find_late(self, ranks: Collection[int], *, may_wait_elsewhere: bool = False) -> Failure | None:
        """Return the failure of a worker for which others have waited longer than `timeout_s`, or None.

        Args:
            ranks: those of the workers that may be at work.
            may_wait_elsewhere: whether they may wait for workers that are not in `ranks`, or may have failed without a report so far.
        """
        limit_s = self._request.timeout_s
        suspects = self._watch.standing(ranks, limit_s) if self._request.hang_timeout else None
        if suspects is None:
            return None
        limit = f"timeout_s={suspects.progress.timeout_s or limit_s:g}"
        found = self._judge(suspects, ranks, limit, may_wait_elsewhere=may_wait_elsewhere)
        # The node of a worker may already have ended it, so that its stacks are not known.
        if found is None and len(suspects.ranks) == 1 and suspects.has_others_ahead and self._stand(suspects):
            rank = suspects.ranks[0]
            found = _failure(
                rank, f"rank {rank}{self._on_node(rank)} hangs {_where(suspects, limit)}", suspects.progress
            )
        return found

    def _judge(
        self, suspects: Suspects, ranks: Collection[int], limit: str, *, may_wait_elsewhere: bool = False
    ) -> Failure | None:
        """Ask for the stacks, keep them, and name the worker that hangs, or the first of several that stand still.

        `limit` is the setting that they have exceeded. Return None if the stacks are not known, if the suspects went on meanwhile, or if
        they may wait for a worker that is not watched (see `culprit`).
        """
        all_progress = {rank: self._reports.progress(rank) for rank in sorted(ranks)}
        workers = self._inspect({rank: progress.pid for rank, progress in all_progress.items()})
        if not workers or not self._stand(suspects):
            return None
        kept = f"{STACKS}{self._keep(workers, all_progress)}{self._place}"
        silent = [rank for rank, worker in workers.items() if not worker.process.stacks]
        unknown = [rank for rank in silent if not workers[rank].process.was_asked]
        waiting = [*unknown, *(rank for rank, worker in workers.items() if waits_in(worker.process.stacks))]
        where = _where(suspects, limit)
        found = culprit(
            suspects, [rank for rank in silent if rank not in unknown], waiting, may_wait_elsewhere=may_wait_elsewhere
        )
        if found is not None:
            process, loader = workers[found].process, awaited(workers[found])
            script, why = line_in_script(process.stacks), process.why
            if loader is not None:
                script = line_in_script(loader.process.stacks) or script
                why = f", its loader process {loader.number} stands still{loader.process.why}"
            text = f"rank {found}{self._on_node(found)} hangs {where}{why}{kept}"
            return _failure(found, text, suspects.progress, script)
        if may_wait_elsewhere:
            return None
        names = ", ".join(map(str, suspects.ranks))
        text = f"ranks {names} stand still {where}, and none of them could be singled out as the cause{kept}"
        places = _places({rank: workers[rank] for rank in suspects.ranks[:_MOST_LOCATIONS]})
        return _failure(suspects.ranks[0], text, suspects.progress, places)

    def _stand(self, suspects: Suspects) -> bool:
        """Return whether the workers have made no progress since they were found."""
        return all(self._reports.progress(rank).beats == suspects.progress.beats for rank in suspects.ranks)

    def _on_node(self, rank: int) -> str:
        return f" on {node}" if (node := self._node_of(rank)) else ""

    def _keep(self, workers: Mapping[int, WorkerStacks], all_progress: Mapping[int, Progress]) -> Path:
        """Write the stacks of each rank and loader process into a new directory of the run, and return the directory."""
        directory = self._run.logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(OSError):  # report the hang even if the disk is full
            directory.mkdir(parents=True, exist_ok=True)
            for rank, worker in workers.items():
                name = f"rank {rank}{self._on_node(rank)}"
                head = f"{name}, process {worker.process.pid}: {all_progress[rank].words}\n\n"
                (directory / f"rank-{rank}.txt").write_text(head + worker.process.text)
                for number, process in worker.loaders:
                    head = f"loader process {number} of {name}, process {process.pid}\n\n"
                    # The loaders of training and of validation may each have a process of this number.
                    with (directory / f"rank-{rank}-loader-{number}.txt").open("a") as file:
                        file.write(head + process.text)
        return directory


def _where(suspects: Suspects, limit: str) -> str:
    return f"{suspects.progress.words}: no progress for {suspects.still_s:.0f} s ({limit})"


def _places(workers: Mapping[int, WorkerStacks]) -> str:
    """Return where ranks are, separated by commas. Only the first place in a file has its directory."""
    found, known = [], set()
    for rank, worker in workers.items():
        place = _place(rank, worker)
        file = place.partition(" at ")[2].rpartition(", line ")[0]
        name = Path(file).name
        found.append(place.replace(file, name) if name in known else place)
        known.add(name)
    return ", ".join(filter(None, found))


def _place(rank: int, worker: WorkerStacks) -> str:
    """Return where a rank is, such as "rank 1 in all_gather at train.py, line 30, in evaluate", or "" if that is not known."""
    stacks, loader = worker.process.stacks, awaited(worker)
    place, line = waits_in(stacks), line_in_script(stacks)
    if loader is not None:
        place, line = f"loader process {loader.number}", line_in_script(loader.process.stacks) or line
    return f"rank {rank}{f' in {place}' if place else ''} at {line}" if line else ""


def _failure(rank: int, text: str, progress: Progress, location: str = "") -> Failure:
    reached = progress.fit, progress.step
    return Failure(
        rank, "hang", time.time(), message=text, reached=reached, phase=progress.phase.in_fit, location=location
    )
