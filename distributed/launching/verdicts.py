"""Collect what is known of the workers of one attempt, and decide: still at work, done, to be restarted, or over.

This module does not depend on an engine or on how processes are started. The agent and all other launchers use it.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.config.registry import hint_of, may_abort, retry_environ
from distributed.launching.causes import Failure, root_cause, signal_name
from distributed.launching.elastic import WorkerCount
from distributed.launching.heartbeat import Reports
from distributed.launching.repeats import Repeats
from distributed.launching.request import LaunchRequest
from distributed.launching.sharing import ways_out
from distributed.launching.stacks import line_in_script, waits_in
from distributed.launching.stopping import KILLING
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.report import write_reports_at_end
from distributed.runs.directory import RunDirectory
from distributed.runs.log_tail import abort_message
from distributed.runs.processes import REGROUP_SIGNAL
from distributed.runs.summary import add_warning, close_results, is_training, resume_lines

# Seconds to wait after a first failure for another one that explains more, by the lowest `Failure.weight` so far. After a lost
# connection, another rank or the kernel usually reports the cause soon.
_SETTLE_S = {0: 0.1, 1: 0.5, 2: 1.0}
# Seconds for the other ranks to end after a rank died during a stop: without the dead rank they cannot save together.
_ORPHANED_STOP_S = 5.0


class Verdict(enum.Enum):
    """The verdict on the workers of one attempt."""

    AT_WORK = "at work"
    DONE = "done"
    RESTART = "restart"
    REGROUP = "regroup"  # to be started again with another number of workers; not a restart after a failure
    OVER = "over"  # failed or stopped, and not to be restarted


@dataclasses.dataclass
class _Rank:
    """What is known of one worker."""

    rank: int
    node: str = ""  # see Failure
    reported: Failure | None = None  # what it reported itself
    raised: Failure | None = None  # an error after which a library may abort the process before the worker reports it
    interrupted: int = 0  # the signal after which the worker saved its state; 0 for none
    is_unshared: bool = False  # whether the worker ended without sharing its work with another one
    status: int | None = None  # exit code, or minus the signal; None while it runs
    ended: float = 0.0  # by the clock of the machine
    ended_monotonic_s: float = 0.0  # by the monotonic clock, which nobody sets
    reached: tuple[int, int] = (0, 0)  # see Failure, also for the next two
    phase: str = ""
    location: str = ""
    operation: str = ""  # the function in which it waited for other ranks when a signal such as SIGABRT ended it
    log_start: int = 0  # the size of its log when it started

    def failure(self) -> Failure | None:
        """Return how the worker failed, or None if it did not fail so far."""
        if self.interrupted:
            return None
        if self.reported is not None:
            return self.reported
        if self.status is None or self.status == 0:
            return None
        if self.raised is not None and self.status == -signal.SIGABRT:
            return self.raised
        return self.left()

    def left(self) -> Failure:
        """Return the end of the worker as a failure, even if it ended with code 0 while others still needed it."""
        assert self.status is not None
        about: dict[str, Any] = {
            "node": self.node, "reached": self.reached, "phase": self.phase, "location": self.location,
        }  # fmt: skip
        if self.status < 0:
            return Failure(self.rank, "signal", self.ended, signum=-self.status, **about)
        return Failure(self.rank, "exit", self.ended, exit_code=self.status, **about)


class Verdicts:
    """Judge the workers of a run. One thread adds what happens (`add`), another waits for the verdict (`judge`)."""

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, display: Display, count: WorkerCount | None = None
    ) -> None:
        self._request, self._run, self._display, self._count = request, run, display, count
        self._changed = threading.Condition()
        self._ranks: dict[int, _Rank] = {}
        self.stop_signal = 0
        self.node: int | None = None  # the number of this node, if the agent started workers on several
        self.failure: dict[str, Any] | None = None  # the newest event of a failed worker, for the journal of node 0
        self.cause: Failure | None = None
        self.is_done = False
        self.trains = False  # whether a fit has begun in this attempt, in a run whose number of workers may change
        self.has_saved = False  # whether this attempt has saved a checkpoint
        self.shared: Path | None = None  # a directory that all nodes share, other than the run directory
        self._is_uploading = False  # whether the main process waits for uploads at the end of a fit
        self._is_regrouping = False  # whether the next attempt has another number of workers
        # When the first worker ended so that another number of them can start.
        self._regrouping_since: float | None = None
        self._repeats = Repeats()
        self._micro_batches: dict[int, int] = {}  # the newest limit of `auto_micro_batch` by the number of the fit
        self.environ: dict[str, str] = {}  # more variables of the workers of the next attempt
        self._had_more = False  # whether the failed attempt already had the variables of `retry_environ`
        self.is_free = False  # whether the last restart that `judge` decided on does not count for `max_restarts`
        # Looks for a worker that hangs, when all failures are lost connections. May return None.
        self.find_hang: Callable[[], Failure | None] = lambda: None

    def begin(
        self,
        ranks: Mapping[int, int],
        attempt: int,
        nodes: Mapping[int, str] | None = None,
        *,
        is_regroup: bool = False,
    ) -> None:
        """Begin an attempt.

        Args:
            ranks: the rank of each worker, by the key that the launcher gives it.
            attempt: the number of the attempt, from 0.
            nodes: the name of the machine of each worker, if there are several.
            is_regroup: whether the attempt has other nodes than the one before, so that it is no restart after a failure.
        """
        with self._changed:
            is_regroup = is_regroup or self._is_regrouping or 0 < len(self._ranks) != len(ranks)
            is_written = any(rank.rank == 0 and rank.interrupted for rank in self._ranks.values())
            self._ranks = {
                key: _Rank(rank, (nodes or {}).get(key, ""), log_start=_size_of(self._log_of(rank)))
                for key, rank in ranks.items()
            }
            self.trains = self.has_saved = self._is_uploading = self._is_regrouping = False
            self._regrouping_since = None
        if not attempt or self._request.node_rank:
            return
        if not is_regroup:
            self._run.event("restarted", restart_count=attempt)
        elif not is_written:  # otherwise the main process wrote it when it saved
            self._run.event("regrouped", restart_count=attempt)

    def wait_for_ends(self) -> None:
        """Wait until no worker of this attempt runs."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_any_at_work())

    def is_any_at_work(self) -> bool:
        """Return whether a worker of this attempt has not ended."""
        return any(rank.status is None for rank in self._ranks.values())

    @property
    def watched(self) -> dict[int, int]:
        """The ranks of the workers that have not failed or ended, by key, or {} while the workers are being stopped, which takes time."""
        ranks = self._ranks
        if self.stop_signal or self._regrouping_since or any(rank.interrupted for rank in ranks.values()):
            return {}
        return {key: rank.rank for key, rank in ranks.items() if rank.status is None and rank.reported is None}

    # messages of the launcher and the workers

    def add(self, message: Mapping[str, Any]) -> None:
        """Record a stop, the end of a worker, or a worker's report. May be called from any thread."""
        with self._changed:
            if message["op"] == "stop":
                self._add_stop(message)
            elif message["op"] == "exit":
                rank = self._ranks[message["local_rank"]]
                rank.status, rank.ended, rank.ended_monotonic_s = message["status"], message["time"], time.monotonic()
                rank.reached, rank.phase = _reached_in(message), rank.phase or message.get("phase", "")
                rank.location = rank.location or message.get("location", "")
                rank.operation = message.get("operation", "")
            else:
                self._add_event(message)
            self._changed.notify_all()

    def add_end(self, message: Mapping[str, Any], reports: Reports, log: Callable[[str], None]) -> None:
        """Record the end of a worker with its step, its phase and, if a signal such as SIGSEGV ended it, its line.

        Args:
            message: the message "exit".
            reports: what the workers have reported.
            log: called with the stacks of a worker that crashed.
        """
        index = message["local_rank"]
        progress = reports.progress(index)
        end = {**message, "reached": (progress.fit, progress.step), "phase": progress.phase.in_fit}
        if message["status"] < 0 and (crash := reports.crash(index)):
            log(crash)
            end |= {"location": line_in_script(crash), "operation": waits_in(crash)}
        self.add(end)

    def _add_stop(self, message: Mapping[str, Any]) -> None:
        self.stop_signal, interrupts = message["signum"], message["interrupts"]
        if message["is_first"]:
            what = "the workers"  # while no Trainer trains in them
            if message["is_starting"]:
                what = "the start"
            elif self._is_uploading:
                what = "after the uploads"
            elif is_training(self._run):
                what = "after this step"
            self._display.handle({"kind": "notice", "text": f"{signal_name(self.stop_signal)}: stopping {what}"})
        elif interrupts < KILLING:
            self._display.handle({"kind": "notice", "text": "still stopping; a third Ctrl-C kills the workers"})
        elif interrupts == KILLING:
            self._display.handle({"kind": "warning", "text": "killing the workers; unsaved progress is lost"})

    def _add_event(self, message: Mapping[str, Any]) -> None:
        for rank in self._ranks.values():
            if rank.rank != message["rank"]:
                continue
            if message["kind"] in ("trains", "saved"):
                self.trains, self.has_saved = True, self.has_saved or message["kind"] == "saved"
            elif message["kind"] == "uploads":
                self._is_uploading = not message["is_over"]
            elif message["kind"] == "shares":
                self.shared = Path(message["directory"])
            elif message["kind"] == "interrupted":
                rank.interrupted = message["signum"]
                if rank.interrupted == REGROUP_SIGNAL:
                    self.expect_regroup()
            elif message["kind"] == "unshared":
                rank.is_unshared = True
            elif message["kind"] == "leaves":
                rank.location, rank.phase = message["location"], message.get("phase", "")
            elif message["kind"] in ("error", "raises") and rank.reported is None:
                kind = "error" if message["is_message_enough"] else "exception"
                failure = Failure(
                    message["rank"], kind, message["time"], message["type"], message["message"], message["traceback"],
                    message["exit_code"], node=rank.node, reached=_reached_in(message), phase=message.get("phase", ""),
                    location=message.get("location", ""), is_echo=message.get("is_echo", False),
                    micro_batch=message.get("micro_batch", 0),
                )  # fmt: skip
                if message["kind"] == "error":
                    rank.reported = failure
                else:
                    rank.raised = failure

    def blame(self, failure: Failure) -> None:
        """Record that a rank hangs, unless it has failed or ended in the meantime. The rank is one of this launcher."""
        with self._changed:
            rank = next(each for each in self._ranks.values() if each.rank == failure.rank)
            if rank.reported is None and rank.status is None:
                rank.reported = dataclasses.replace(failure, node=rank.node)
            self._changed.notify_all()

    # the verdict

    def judge(self, restarts_left: int) -> Verdict:
        """Return the verdict now. Wait up to `monitor_interval` for a message, so that an end is detected immediately."""
        with self._changed:
            if not self._is_news():
                self._changed.wait(self._request.monitor_interval)
            if not self._is_news():
                return Verdict.AT_WORK
            if all(rank.status is not None and rank.failure() is None for rank in self._ranks.values()):
                return self._ended()
            if self._is_regroup_late():
                return self._regroup_without_the_late()
            self._settle()
            failures = [failure for rank in self._ranks.values() if (failure := rank.failure())]
            killed = sum(rank.status == -signal.SIGKILL for rank in self._ranks.values())
            # If the cause is missing among them, it may be a rank that exited with 0.
            if all(failure.is_consequence for failure in failures):
                failures += [rank.left() for rank in self._ranks.values() if rank.status == 0]
        cause = root_cause(failures)
        # A rank that has waited too long also reports a lost connection.
        if cause.is_consequence and not self.stop_signal:
            cause = self.find_hang() or cause
        return self._failed(self._explained(cause), restarts_left, max(1, killed))

    def _explained(self, cause: Failure) -> Failure:
        """Return the failure. If C++ aborted the process, add the collective that it was in and the message that it wrote to the log."""
        if cause.kind != "signal" or cause.signum != signal.SIGABRT:
            return cause
        rank = next(each for each in self._ranks.values() if each.rank == cause.rank)
        where, said = rank.operation and f"in {rank.operation}", abort_message(self._log_of(cause.rank), rank.log_start)
        return dataclasses.replace(cause, message=": ".join(filter(None, (where, said))))

    def _log_of(self, rank: int) -> Path:
        return self._run.logs / f"rank-{rank}.log"

    def _is_news(self) -> bool:
        """Return whether the workers have ended or must be ended."""
        ranks = self._ranks.values()
        if all(rank.status is not None for rank in ranks):
            return True
        failed = [rank for rank in ranks if rank.failure() is not None]
        if self._is_regroup_late():
            return True
        if self.stop_signal or any(rank.interrupted for rank in ranks):
            since = min((rank.ended_monotonic_s for rank in failed if rank.status is not None), default=None)
            return since is not None and time.monotonic() - since > _ORPHANED_STOP_S
        return bool(failed)

    def _is_regroup_late(self) -> bool:
        """Return whether `timeout_s` has passed since the first worker ended so that another number of workers can start."""
        since = self._regrouping_since
        return since is not None and not self.stop_signal and time.monotonic() - since > self._request.timeout_s

    def _regroup_without_the_late(self) -> Verdict:
        late = ", ".join(str(rank.rank) for rank in self._ranks.values() if rank.status is None)
        if late:
            text = f"killing rank {late}, which did not end within {self._request.timeout_s:g} s (timeout_s) after the others"
            self._display.handle({"kind": "warning", "text": text})
        self._is_regrouping = True
        return Verdict.REGROUP

    def _ended(self) -> Verdict:
        interrupted = next((rank.interrupted for rank in self._ranks.values() if rank.interrupted), 0)
        if interrupted == REGROUP_SIGNAL and not self.stop_signal:
            self._is_regrouping = True
            return Verdict.REGROUP
        if interrupted:
            self.stop_signal = self.stop_signal or interrupted
            return Verdict.OVER
        self.is_done = True
        return Verdict.DONE

    def _settle(self) -> None:
        """Wait shortly for a failure that explains more than the first one, and for the last output of the failing rank."""
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

    def _failed(self, cause: Failure, restarts_left: int, lost: int) -> Verdict:
        """Record the cause of a failed attempt, and return whether to start the workers again.

        `lost` is the number of workers that a run with a changing number goes on without.
        """
        before = self._micro_batches.get(cause.reached[0], cause.micro_batch + 1)
        self.is_free = 0 < cause.micro_batch < before and not self.stop_signal
        if self.is_free:
            return self._restart_with_less(cause)
        more = retry_environ(cause.message)
        self._had_more = bool(more) and more.items() <= {**os.environ, **self.environ}.items()
        if self.stop_signal or not self._may_restart(cause):
            restarts_left = 0
        # No worker is lost after an error of the script, and errors with an entry in `retry_environ` are errors of the script.
        left = self._count.shrink(lost) if self._may_shrink(cause) and not more and self._count is not None else 0
        if not left and (repeated := self._repeats.count(cause)) and restarts_left:
            because = f"{repeated} (max_restarts={self._request.max_restarts})"
            cause = dataclasses.replace(cause, no_restart_because=because)
            restarts_left = 0
        self.cause = cause
        self.environ = more if restarts_left else {}
        then = self._then(cause, restarts_left, left)
        if not self.stop_signal:
            self._record_failure(cause, then)
            if left:
                self._display.handle({"kind": "warning", "text": f"{in_words(cause)}: {then}"})
                self._is_regrouping = True
                return Verdict.REGROUP
        if not restarts_left:
            return Verdict.OVER
        self._display.handle({"kind": "warning", "text": f"{in_words(cause)}: {then}"})
        return Verdict.RESTART

    def _record_failure(self, cause: Failure, then: str, **more: Any) -> None:
        """Record the failure and what is done about it, here and in the journal of the run."""
        node = self.node if cause.node_rank is None else cause.node_rank
        detail: dict[str, Any] = {} if node is None else {"node": node}
        self.failure = {
            "time": time.time(), "rank": cause.rank, "cause": in_words(cause), **detail, **_facts_of(cause), **more, "then": then,
        }  # fmt: skip
        self._run.event("worker_failed", **self.failure)

    def _then(self, cause: Failure, restarts_left: int, left: int) -> str:
        """Return what the launcher does after a failure, as text. `left` is the number of processes that go on, or 0."""
        most = self._request.max_restarts
        variables = {} if self._had_more else retry_environ(cause.message)
        more = " ".join(f"{name}={value}" for name, value in variables.items())
        if left:
            return f"going on with {left} process{'es' * (left > 1)}"
        if restarts_left:
            # With a launcher on each node, this one does not know yet whether a node was lost, which is not counted.
            is_counted = self.node is None or not cause.is_consequence
            then = f"restarting ({most - restarts_left + 1} of {most})" if is_counted else "restarting"
            return f"{then} with {more}, so that the traceback shows the failing line" if more else then
        if cause.no_restart_because or cause.kind == "error" or self._had_more:
            return ""
        if more or self._may_restart(cause):
            then = f"no restart is left (max_restarts={most})" if most else "max_restarts=0"
            return f"{then}; set {more} to see the failing line in the traceback" if more else then
        return "not restarted: only kills and hangs are restarted"

    def _restart_with_less(self, cause: Failure) -> Verdict:
        """Record that a rank ran out of memory, so that the next attempt takes smaller micro-batches, and restart."""
        self._micro_batches[cause.reached[0]] = cause.micro_batch
        samples = f"{cause.micro_batch} sample{'s' * (cause.micro_batch > 1)}"
        then = f"restarting with micro-batches of at most {samples} (auto_micro_batch)"
        self._record_failure(cause, then, micro_batch=cause.micro_batch, fit=cause.reached[0])
        self._display.handle({"kind": "warning", "text": f"{in_words(cause)}: {then}"})
        return Verdict.RESTART

    def _is_from_elsewhere(self, cause: Failure) -> bool:
        """Return whether a failure is the consequence of one on another node, whose launcher restarts too, or which Ray will report.

        An elastic run on Ray is no such case: it goes on once it is known which node is lost.
        """
        is_awaited = self.node is None and self._request.is_elastic
        return cause.is_consequence and bool(cause.node) and not is_awaited

    def _may_shrink(self, cause: Failure) -> bool:
        return cause.kind == "signal" and not self.stop_signal

    def _may_restart(self, cause: Failure) -> bool:
        if retry_environ(cause.message):  # the error comes again, so that one more attempt is enough
            return not self._had_more or (cause.kind == "exception" and self._request.restart_on_exception)
        if cause.kind in ("signal", "hang"):
            return True
        if self._is_from_elsewhere(cause):
            return True
        return cause.kind == "exception" and self._request.restart_on_exception

    @property
    def leaves(self) -> bool:
        """Return whether only this node ends after a SIGTERM to its launcher. If all workers agreed on a stop, all nodes end."""
        if self.stop_signal != signal.SIGTERM or not self._request.may_leave or self.is_done:
            return False
        return all(rank.interrupted in (0, REGROUP_SIGNAL) for rank in self._ranks.values())

    @property
    def has_regrouped(self) -> bool:
        """Return whether all workers have saved and ended so that another number of them can start."""
        return bool(self._ranks) and all(rank.interrupted == REGROUP_SIGNAL for rank in self._ranks.values())

    def expect_regroup(self) -> None:
        """Give the workers `timeout_s` from now on to save and end, so that another number of workers can start."""
        self._regrouping_since = self._regrouping_since or time.monotonic()

    # the end of the run

    def finish(self) -> int:
        """End the run and return its exit code.

        On node 0, complete the result files that no worker has completed, and write the report. Show the cause last.
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
        """Show how the run ended. The cause of a failure is the last text on the screen."""
        self._display.close()
        cause = self.cause
        if code == 0:
            self._warn_of_unshared_work()
        # A result.json shows that a Trainer has begun to train. Workers that ended as usual have nothing left to do.
        if (
            code in (130, 143)
            and not self.is_done
            and self._request.again
            and (self._run.path / "result.json").exists()
        ):
            self._display.handle({"kind": "notice", "text": resume_lines(self._request.again)})
        # With a payload, `fit` raises the cause in the calling process.
        if code in (0, 130, 143) or cause is None or self._request.payload is not None:
            return
        text = f"error: {cause}"
        if cause.no_restart_because:
            text += f"; {cause.no_restart_because}"
        elif cause.kind in ("signal", "hang") and (then := self._then(cause, 0, 0)):
            text += f"; {then}"
        if cause.kind == "signal" and (hint := hint_of(cause.message)):
            text += f"\nhint: {hint}"
        if cause.traceback and cause.kind == "exception":
            text += f" (whole log: {self._log_of(cause.rank)})\n{cause.traceback}"
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


def _facts_of(cause: Failure) -> dict[str, Any]:
    """Return what is known of a failure besides its rank and cause, for its event."""
    fit, step = cause.reached
    facts = {
        "kind": cause.kind, "in_step": step if fit else None, "phase": cause.phase, "place": cause.location,
        "traceback": cause.traceback if cause.kind == "exception" else "",
    }  # fmt: skip
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reached_in(message: Mapping[str, Any]) -> tuple[int, int]:
    fit, step = message.get("reached", (0, 0))
    return fit, step


def in_words(cause: Failure) -> str:
    """Return the cause in one line."""
    if cause.is_consequence:
        where = f" on {cause.node}" if cause.node else ""
        return f"rank {cause.rank}{where} lost the connection to another rank"
    message, _, rest = cause.message.partition("\n")
    if rest and not may_abort(message):  # libraries add the same lines of advice to each error of this kind
        message = cause.message
    text = f"{cause}: {message}" if cause.kind == "exception" and message else str(cause)
    return f"{text}; {cause.no_restart_because}" if cause.no_restart_because else text
