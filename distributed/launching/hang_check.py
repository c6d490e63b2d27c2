"""Look for a worker of this node that hangs: name it, and keep the stacks of all workers and loader processes in the run directory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from distributed.launching.causes import Failure
from distributed.launching.hangs import SLOW, HangWatch, Suspects, culprit
from distributed.launching.heartbeat import Board, Progress
from distributed.launching.loader_stacks import LoaderProcess, awaited, collect_of_loaders
from distributed.launching.request import LaunchRequest
from distributed.launching.stacks import collect, line_in_script, seen_from_outside, waits_in, why_silent
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory

_MOST_LOCATIONS = 4  # how many ranks are listed with their locations if no single rank is the cause


class HangCheck:
    """Check the workers of each attempt of this node.

    Args:
        request: the request, which has `hang_timeout` and `hang_timeout_slow`.
        run: the run directory, in which the stacks are kept.
        display: shows that workers stand still because of another node.
        board: the progress and the stacks of the workers.
        node: the name of this node, if there are several.
        ask: called to request the stacks of all workers.
    """

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, display: Display, board: Board, node: str, ask: Callable[[], None]
    ) -> None:  # fmt: skip
        self._request, self._run, self._display, self._board, self._ask = request, run, display, board, ask
        self._node = f" on {node}" if node else ""
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._watch = HangWatch(self._request.hang_timeout or 0.0, self._request.hang_timeout_slow)
        self._looked = time.monotonic()
        # `beats` of the workers that last stood still without a cause on this node, so that they are reported only once.
        self._undecided = -1

    def find(self, ranks: Mapping[int, int]) -> Failure | None:
        """Return the failure of a worker that hangs, or None. `ranks` maps the local rank of each worker to check to its rank."""
        if not self._request.hang_timeout:
            return None
        now = time.monotonic()
        # This process may have been stopped together with the workers, and did not watch them in that time.
        seconds = min(now - self._looked, 2 * self._request.monitor_interval + 1.0)
        self._looked = now
        all_progress = {index: self._board.progress(index) for index in ranks}
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
        all_progress = {index: self._board.progress(index) for index in ranks}
        pids = {index: progress.pid for index, progress in all_progress.items()}
        stacks, loaders = collect(self._board.stacks, pids, self._ask), collect_of_loaders(pids)
        kept = f"stacks are in {self._keep(stacks, loaders, all_progress, ranks)}"
        awaited_by = {index: awaited(stacks[index], loaders[index]) for index in ranks}
        silent = [index for index, text in stacks.items() if not text]
        waiting, is_alone = [index for index, text in stacks.items() if waits_in(text)], self._request.num_nodes == 1
        where = f"{suspects.progress.words}: no progress for {suspects.still_s:.0f} s ({limit})"
        found = culprit(suspects, silent, waiting, is_alone=is_alone)
        if found is not None:
            loader, script = awaited_by[found], line_in_script(stacks[found])
            why = _why(pids[found], stacks[found])
            if loader is not None:
                script = line_in_script(loader.stacks) or script
                why = f", its loader process {loader.number} stands still{_why(loader.pid, loader.stacks)}"
            text = f"rank {ranks[found]}{self._node} hangs {where}{why}; {kept}"
            return _failure(ranks[found], text, suspects.progress, script)
        names, is_one = ", ".join(str(ranks[index]) for index in suspects.keys), len(suspects.keys) == 1
        stand = f"rank{'' if is_one else 's'} {names}{self._node} stand{'s' * is_one} still {where}"
        if is_alone:
            text = f"{stand}, and none of them could be singled out as the cause; {kept}"
            keys = suspects.keys[:_MOST_LOCATIONS]
            places = (_place(ranks[index], stacks[index], awaited_by[index]) for index in keys)
            return _failure(ranks[suspects.keys[0]], text, suspects.progress, ", ".join(filter(None, places)))
        self._undecided = suspects.progress.beats
        text = f"{stand}, perhaps because of a rank on another node; {kept}"
        self._display.handle({"kind": "notice", "text": text})
        self._run.event("stands_still", cause=text)
        return None

    def _keep(
        self, stacks: Mapping[int, str], loaders: Mapping[int, Sequence[LoaderProcess]],
        all_progress: Mapping[int, Progress], ranks: Mapping[int, int],
    ) -> Path:  # fmt: skip
        """Write the stacks of each rank and loader process into a new directory of the run, and return the directory."""
        directory = self._run.logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}"
        with contextlib.suppress(OSError):  # report the hang even if the disk is full
            directory.mkdir(parents=True, exist_ok=True)
            for index, text in stacks.items():
                rank = f"rank {ranks[index]}{self._node}"
                head = f"{rank}, process {all_progress[index].pid}: {all_progress[index].words}\n\n"
                (directory / f"rank-{ranks[index]}.txt").write_text(head + (text or _instead(all_progress[index].pid)))
                for each in loaders[index]:
                    head = f"loader process {each.number} of {rank}, process {each.pid}\n\n"
                    # The loaders of training and of validation may each have a process of this number.
                    with (directory / f"rank-{ranks[index]}-loader-{each.number}.txt").open("a") as file:
                        file.write(head + (each.stacks or _instead(each.pid)))
        return directory


def _why(pid: int, stacks: str) -> str:
    """Return the line of the user's code at which a process is, or why it did not answer, after a comma, or ""."""
    line = line_in_script(stacks)
    reason = line and f"it is at {line}" if stacks else why_silent(pid)
    return f", {reason}" if reason else ""


def _place(rank: int, stacks: str, loader: LoaderProcess | None) -> str:
    """Return where a rank is, such as "rank 1 in all_gather at train.py, line 30, in evaluate", or "" if that is not known."""
    place, line = waits_in(stacks), line_in_script(stacks)
    if loader is not None:
        place, line = f"loader process {loader.number}", line_in_script(loader.stacks) or line
    return f"rank {rank}{f' in {place}' if place else ''} at {line}" if line else ""


def _failure(rank: int, text: str, progress: Progress, location: str = "") -> Failure:
    reached = progress.fit, progress.step
    return Failure(
        rank, "hang", time.time(), message=text, reached=reached, phase=progress.phase.in_fit, location=location
    )


def _instead(pid: int) -> str:
    """Return the text that replaces the stacks of a process that did not answer."""
    more = seen_from_outside(pid) or "py-spy (pip install py-spy) may show its stacks from outside.\n"
    return f"The process did not answer: {why_silent(pid) or 'the reason is not known'}.\n\n{more}"
