"""Collect what is known of the workers of one attempt, and decide: still at work, done, to be restarted, or over.

Nothing here knows an engine or a way of starting processes: torch's agent uses it, and so does every other launcher.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Mapping
from typing import Any

from distributed.launching.causes import Failure, root_cause, signal_name
from distributed.launching.request import LaunchRequest
from distributed.launching.sharing import ways_out
from distributed.launching.stopping import KILLING
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.report import write_reports_at_end
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import add_warning, close_results, is_training, resume_lines

# Seconds to wait for a better explanation after the first sign of a failure, by the weight of that failure. A lost connection is
# a consequence of something that another rank, or the kernel, is about to report.
_SETTLE_S = {0: 0.1, 1: 0.5, 2: 1.0}
_ORPHANED_STOP_S = (
    5.0  # for the other ranks to end after a rank died during a stop, because they cannot save together any more
)


class Verdict(enum.Enum):
    """The verdict on the workers of one attempt."""

    AT_WORK = "at work"
    DONE = "done"
    RESTART = "restart"
    OVER = "over"  # failed or stopped, and not to be restarted


@dataclasses.dataclass
class _Rank:
    """What is known of one worker."""

    rank: int
    report: Failure | None = None
    interrupted: int = 0  # the signal after which it saved its state
    is_unshared: bool = False  # whether it ended without sharing its work with another
    status: int | None = None  # exit code, or minus the signal; None while it runs
    ended: float = 0.0

    def failure(self) -> Failure | None:
        """Return how it failed, or None."""
        if self.interrupted:
            return None
        if self.report is not None:
            return self.report
        if self.status is None or self.status == 0:
            return None
        return self.left()

    def left(self) -> Failure:
        """Return its end as a failure, also an end with code 0 while others still needed it."""
        assert self.status is not None
        if self.status < 0:
            return Failure(self.rank, "signal", self.ended, signum=-self.status)
        return Failure(self.rank, "exit", self.ended, exit_code=self.status)


class Verdicts:
    """Judge the workers of a run. One thread adds what happens (`add`), another waits for the verdict (`judge`)."""

    def __init__(self, request: LaunchRequest, run: RunDirectory, display: Display) -> None:
        self._request, self._run, self._display = request, run, display
        self._changed = threading.Condition()
        self._ranks: dict[int, _Rank] = {}
        self.stop_signal = 0
        self.cause: Failure | None = None
        self.is_done = False

    def begin(self, ranks: Mapping[int, int], attempt: int) -> None:
        """Begin an attempt. `ranks` maps the key that the launcher gives each worker to its rank."""
        with self._changed:
            self._ranks = {key: _Rank(rank) for key, rank in ranks.items()}
        if attempt:
            self._run.event("restarted", restart_count=attempt)

    def wait_for_ends(self) -> None:
        """Wait until no worker of this attempt runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_any_at_work())

    def is_any_at_work(self) -> bool:
        """Return whether a worker of this attempt has not ended."""
        return any(rank.status is None for rank in self._ranks.values())

    # messages of the launcher and the workers

    def add(self, message: Mapping[str, Any]) -> None:
        """Add a stop, the end of a worker, or what a worker reports. Any thread."""
        with self._changed:
            if message["op"] == "stop":
                self._add_stop(message)
            elif message["op"] == "exit":
                rank = self._ranks[message["local_rank"]]
                rank.status, rank.ended = message["status"], message["time"]
            else:
                self._add_report(message)
            self._changed.notify_all()

    def _add_stop(self, message: Mapping[str, Any]) -> None:
        self.stop_signal, interrupts = message["signum"], message["interrupts"]
        if message["is_first"]:
            what = "the workers"  # no Trainer of ours is training in them
            if message["is_starting"]:
                what = "the start"
            elif is_training(self._run):
                what = "after this step"
            self._display.handle({"kind": "notice", "text": f"{signal_name(self.stop_signal)}: stopping {what}"})
        elif interrupts < KILLING:
            self._display.handle({"kind": "notice", "text": "still stopping; a third Ctrl-C kills the workers"})
        elif interrupts == KILLING:
            self._display.handle({"kind": "warning", "text": "killing the workers; unsaved progress is lost"})

    def _add_report(self, message: Mapping[str, Any]) -> None:
        for rank in self._ranks.values():
            if rank.rank != message["rank"]:
                continue
            if message["kind"] == "interrupted":
                rank.interrupted = message["signum"]
            elif message["kind"] == "unshared":
                rank.is_unshared = True
            elif rank.report is None:
                kind = "error" if message["is_message_enough"] else "exception"
                rank.report = Failure(
                    message["rank"], kind, message["time"], message["type"], message["message"], message["traceback"],
                    message["exit_code"],
                )  # fmt: skip

    # the verdict

    def judge(self, restarts_left: int) -> Verdict:
        """Return the verdict now. Wait up to `monitor_interval` for news, so that an end is seen immediately."""
        with self._changed:
            if not self._is_news():
                self._changed.wait(self._request.monitor_interval)
            if not self._is_news():
                return Verdict.AT_WORK
            if all(rank.status is not None and rank.failure() is None for rank in self._ranks.values()):
                return self._ended()
            self._settle()
            failures = [failure for rank in self._ranks.values() if (failure := rank.failure())]
            if all(
                failure.is_consequence for failure in failures
            ):  # no cause among them: a rank that exited with 0 may be the cause
                failures += [rank.left() for rank in self._ranks.values() if rank.status == 0]
        return self._failed(root_cause(failures), restarts_left)

    def _is_news(self) -> bool:
        """Return whether the workers have ended or must be ended."""
        ranks = self._ranks.values()
        if all(rank.status is not None for rank in ranks):
            return True
        failed = [rank for rank in ranks if rank.failure() is not None]
        if self.stop_signal or any(rank.interrupted for rank in ranks):
            since = min((rank.ended for rank in failed if rank.status is not None), default=None)
            return since is not None and time.time() - since > _ORPHANED_STOP_S
        return bool(failed)

    def _ended(self) -> Verdict:
        interrupted = next((rank.interrupted for rank in self._ranks.values() if rank.interrupted), 0)
        if interrupted:
            self.stop_signal = self.stop_signal or interrupted
            return Verdict.OVER
        self.is_done = True
        return Verdict.DONE

    def _settle(self) -> None:
        """Wait shortly for a better explanation than the first one, and for the last output of the failing rank."""
        if self.stop_signal:
            return
        deadline = time.monotonic() + _SETTLE_S[2]
        while True:
            failures = [rank for rank in self._ranks.values() if rank.failure() is not None]
            weight = min(failure.weight for rank in failures if (failure := rank.failure()))
            is_over = all(rank.status is not None for rank in failures)
            if any(rank.status is not None and rank.status < 0 for rank in failures) and weight == 0:
                return
            limit = deadline - _SETTLE_S[2] + _SETTLE_S[weight] + (0.0 if is_over else 0.4)
            left = limit - time.monotonic()
            if left <= 0 or not self.is_any_at_work():
                return
            self._changed.wait(left)

    def _failed(self, cause: Failure, restarts_left: int) -> Verdict:
        self.cause = cause
        if self.stop_signal or not self._may_restart(cause):
            restarts_left = 0
        if not self.stop_signal:
            detail = {"traceback": cause.traceback} if cause.kind == "exception" and cause.traceback else {}
            self._run.event("worker_failed", rank=cause.rank, cause=in_words(cause), **detail)
        if not restarts_left:
            return Verdict.OVER
        attempt = self._request.max_restarts - restarts_left + 1
        text = f"{in_words(cause)}: restarting ({attempt} of {self._request.max_restarts})"
        self._display.handle({"kind": "warning", "text": text})
        return Verdict.RESTART

    def _may_restart(self, cause: Failure) -> bool:
        if cause.kind == "signal":
            return True
        if cause.kind == "exception" and cause.is_consequence and self._request.num_nodes > 1:
            return True  # the cause is on another node, which restarts
        return cause.kind == "exception" and self._request.restart_on_exception

    # the end

    def finish(self) -> int:
        """End the run and return its exit code.

        On node 0, result files that no worker closed are closed, and the report is written. The cause is the last thing on the screen.
        """
        code, cause = self.exit_code(), self.cause
        if self._request.node_rank == 0:
            close_results(self._run, code, None if cause is None else in_words(cause), end_elsewhere)
            write_reports_at_end(self._run, lambda text: self._display.handle({"kind": "notice", "text": text}))
        self.show_end(code)
        return code

    def exit_code(self) -> int:
        """Return the exit code of the run."""
        cause = self.cause
        if self.stop_signal and not (cause is not None and cause.kind == "error"):
            return 130 if self.stop_signal == 2 else 143
        if self.is_done:
            return 0
        return cause.exit_code if cause is not None and cause.kind == "error" else 1

    def show_end(self, code: int) -> None:
        """Show the cause, as the last thing on the screen."""
        self._display.close()
        cause = self.cause
        if code == 0:
            self._warn_of_unshared_work()
        if (
            code in (130, 143) and self._request.again and (self._run.path / "result.json").exists()
        ):  # a Trainer has begun to train
            self._display.handle({"kind": "notice", "text": resume_lines(self._request.again)})
        if (
            code in (0, 130, 143) or cause is None or self._request.payload is not None
        ):  # the caller of `fit` raises the cause
            return
        text = f"error: {cause}"
        if cause.kind == "signal":
            budget = self._request.max_restarts
            text += f"; no restart is left (max_restarts={budget})" if budget else "; max_restarts=0"
        if cause.traceback and cause.kind == "exception":
            text += f" (whole log: {self._run.logs / f'rank-{cause.rank}.log'})\n{cause.traceback}"
        self._display.handle({"kind": "error", "text": text})

    def _warn_of_unshared_work(self) -> None:
        """Warn on node 0 if several workers ran the script, and none of them shared its work with another."""
        request = self._request
        is_for_us = request.payload is None and request.node_rank == 0 and request.world_size > 1
        if not is_for_us or not all(rank.is_unshared for rank in self._ranks.values()):
            return
        text = ways_out(request.script, request.world_size)
        add_warning(self._run, text, world_size=request.world_size)
        self._display.handle({"kind": "warning", "text": text})


def in_words(cause: Failure) -> str:
    """Return the cause in one line."""
    if cause.is_consequence:
        return f"rank {cause.rank} lost the connection to another rank"
    return f"{cause}: {cause.message}" if cause.kind == "exception" and cause.message else str(cause)
