"""Look for a worker that hangs: name it, and keep the stacks of all workers and loader processes in the run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distributed.launching.causes import Failure
from distributed.launching.hangs import SLOW, HangWatch, Suspects, culprit
from distributed.launching.heartbeat import Progress, Reports
from distributed.launching.loader_stacks import WorkerStacks, awaited
from distributed.launching.request import LaunchRequest
from distributed.launching.stacks import line_in_script, waits_in
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory

_MOST_LOCATIONS = 4  # how many ranks are listed with their locations if no single rank is the cause


class HangCheck:
    """Check the workers of each attempt that this launcher has started.

    Args:
        request: the request, which has `hang_timeout` and `hang_timeout_slow`.
        run: the run directory, in which the stacks are kept.
        display: shows that workers stand still because of another node.
        reports: the progress of the workers.
        inspect: returns the stacks of workers, by key, when called with their process ids.
        node_of: returns the name of the node of a rank, or "" if there is only one node.
        has_all: whether the launcher has started the workers of all nodes, so that none of them waits for others.
    """

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, display: Display, reports: Reports,
        inspect: Callable[[Mapping[int, int]], Mapping[int, WorkerStacks]], node_of: Callable[[int], str], *, has_all: bool,
    ) -> None:  # fmt: skip
        self._request, self._run, self._display, self._reports = request, run, display, reports
        self._inspect, self._node_of, self._has_all = inspect, node_of, has_all
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._watch = HangWatch(self._request.hang_timeout or 0.0, self._request.hang_timeout_slow)
        self._looked = time.monotonic()
        # `beats` of the workers that last stood still without a cause on this node, so that they are reported only once.
        self._undecided = -1

    def find(self, ranks: Mapping[int, int]) -> Failure | None:
        """Return the failure of a worker that hangs, or None. `ranks` maps the key of each worker to check to its rank."""
        if not self._request.hang_timeout:
            return None
        now = time.monotonic()
        # This process may have been stopped together with the workers, and did not watch them in that time.
        seconds = min(now - self._looked, 2 * self._request.monitor_interval + 1.0)
        self._looked = now
        all_progress = {index: self._reports.progress(index) for index in ranks}
        suspects = self._watch.look(all_progress, seconds)
        if suspects is None or suspects.progress.beats == self._undecided:
            return None
        limit, slow = f"hang_timeout={self._request.hang_timeout:g}", self._request.hang_timeout_slow
        if suspects.progress.is_slow:
            limit = f"{SLOW} times {limit}" if slow is None else f"hang_timeout_slow={slow:g}"
        return self._judge(suspects, ranks, limit)

    def find_late(self, ranks: Mapping[int, int]) -> Failure | None:
        """Return the failure of a worker for which others have waited longer than `timeout_s`, or None."""
        limit_s = self._request.timeout_s
        suspects = self._watch.standing(ranks, limit_s) if self._request.hang_timeout else None
        if suspects is None:
            return None
        return self._judge(suspects, ranks, f"timeout_s={suspects.progress.timeout_s or limit_s:g}")

    def _judge(self, suspects: Suspects, ranks: Mapping[int, int], limit: str) -> Failure | None:
        """Ask for the stacks, keep them, and name the worker that hangs. `limit` is the setting that it has exceeded."""
        all_progress = {index: self._reports.progress(index) for index in ranks}
        workers = self._inspect({index: progress.pid for index, progress in all_progress.items()})
        kept = f"stacks are in {self._keep(workers, all_progress, ranks)}"
        silent = [index for index, worker in workers.items() if not worker.process.stacks]
        waiting = [index for index, worker in workers.items() if waits_in(worker.process.stacks)]
        where = f"{suspects.progress.words}: no progress for {suspects.still_s:.0f} s ({limit})"
        found = culprit(suspects, silent, waiting, is_alone=self._has_all)
        if found is not None:
            process, loader = workers[found].process, awaited(workers[found])
            script, why = line_in_script(process.stacks), process.why
            if loader is not None:
                script = line_in_script(loader.process.stacks) or script
                why = f", its loader process {loader.number} stands still{loader.process.why}"
            text = f"rank {ranks[found]}{self._on_node(ranks[found])} hangs {where}{why}; {kept}"
            return _failure(ranks[found], text, suspects.progress, script)
        names, is_one = ", ".join(str(ranks[index]) for index in suspects.keys), len(suspects.keys) == 1
        stand = f"rank{'' if is_one else 's'} {names}"
        still = f"stand{'s' * is_one} still {where}"
        if self._has_all:
            text = f"{stand} {still}, and none of them could be singled out as the cause; {kept}"
            places = (_place(ranks[index], workers[index]) for index in suspects.keys[:_MOST_LOCATIONS])
            return _failure(ranks[suspects.keys[0]], text, suspects.progress, ", ".join(filter(None, places)))
        self._undecided = suspects.progress.beats
        here = self._on_node(ranks[suspects.keys[0]])
        text = f"{stand}{here} {still}, perhaps because of a rank on another node; {kept}"
        self._display.handle({"kind": "notice", "text": text})
        self._run.event("stands_still", cause=text)
        return None

    def _on_node(self, rank: int) -> str:
        return f" on {node}" if (node := self._node_of(rank)) else ""

    def _keep(
        self, workers: Mapping[int, WorkerStacks], all_progress: Mapping[int, Progress], ranks: Mapping[int, int]
    ) -> Path:
        """Write the stacks of each rank and loader process into a new directory of the run, and return the directory."""
        directory = self._run.logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(OSError):  # report the hang even if the disk is full
            directory.mkdir(parents=True, exist_ok=True)
            for index, worker in workers.items():
                rank = f"rank {ranks[index]}{self._on_node(ranks[index])}"
                head = f"{rank}, process {worker.process.pid}: {all_progress[index].words}\n\n"
                (directory / f"rank-{ranks[index]}.txt").write_text(head + worker.process.text)
                for number, process in worker.loaders:
                    head = f"loader process {number} of {rank}, process {process.pid}\n\n"
                    # The loaders of training and of validation may each have a process of this number.
                    with (directory / f"rank-{ranks[index]}-loader-{number}.txt").open("a") as file:
                        file.write(head + process.text)
        return directory


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
