"""Why a run ended, or stands still: what failed first, where, and what was done about it, read from the files of its directory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.config.kinds import COUNT, SECONDS, check_kinds, is_number
from distributed.config.reading import LimitError, open_regular, parse_json
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.runs.failures import FAILURES, STACKS, STARTS, failures_of
from distributed.runs.fixes import STANDING_STILL, fix_of
from distributed.runs.listing import RunState, read_state_and_events
from distributed.runs.log_tail import last_line, tail
from distributed.runs.recorded import read_recorded

STANDING = "standing still"  # verdict on a run that goes on, but has not shown progress for long
_ENDS = ("finished", "preempted")
_HANG_TIMEOUT_S = 60.0  # the default of `hang_timeout`
_SLOW = 10  # a start may take this many times `hang_timeout`, unless `hang_timeout_slow` is set
_USUAL = 5  # a run may be silent for this many times the longest time between two log lines
_LONG = 4  # a cause with at least this many lines is shortened
_MOST_TEXT = 4000  # characters of a text of the journal
_STOPPED = re.compile(r" (was stopped by \w+)$")  # the end of the cause of a lost node that a signal stopped
_PLACE = re.compile(r" on node \d{1,6}$")  # after the directory with the stacks, which only this node has
_RANK = re.compile(r"\brank (\d{1,6})\b")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A failure of a worker or a node, as the journal has it. Unknown facts are "" or None."""

    time: float
    cause: str  # in one line, with the number of the rank
    rank: int | None
    node: str  # number or name of the node
    kind: str  # see `launching.causes.Failure`
    step: int | None
    phase: str
    location: str  # file, line and function of the user's code
    then: str  # what the launcher did
    stacks: str  # the directory with the stacks of all ranks, relative to the run
    log: str  # the log of the rank, relative to the run
    last_output: str  # the last line in that log, unless another attempt may have written it
    has_gone_on: bool  # whether another attempt has begun


@dataclasses.dataclass(frozen=True)
class Why:
    """The outcome of a run, and its reason.

    Attributes:
        state: the state of the run.
        verdict: its status, or `STANDING`.
        problem: the failure that ended the run or, if it goes on or has finished, the newest one; None without a failure.
        num_failures: failures of this launch.
        resumed_at: the steps at which workers went on, in order.
        num_restarts: starts of the workers after a failure in this launch.
        failed_saves: checkpoints that could not be saved, each with the cause.
        has_saved_since: whether a later save succeeded.
        nodes: what became of nodes that were lost or came, such as "node 1 was lost and has joined again".
        damaged: checkpoints that were set aside because they are damaged.
        deleted: checkpoints, or their directory, that somebody deleted during the run.
        stopped_by: name of the signal that stopped the run, or "".
        stop_reason: why training ended early, or "".
        silent_s: seconds since the last sign of progress.
        usual_s: seconds between two log lines, or None if that is not known.
        launcher: the launcher that the directory names, such as "process 12 on node0", or "".
        is_rank_0: whether `launcher` is the process of rank 0, because another launcher started the ranks.
        fix: what to try, or "".
    """

    state: RunState
    verdict: str
    problem: Problem | None
    num_failures: int
    num_restarts: int
    resumed_at: Sequence[int]
    failed_saves: Sequence[str]
    has_saved_since: bool
    nodes: Sequence[str]
    damaged: Sequence[str]
    deleted: Sequence[str]
    stopped_by: str
    stop_reason: str
    silent_s: float
    usual_s: float | None
    launcher: str
    is_rank_0: bool
    fix: str


def read_why(path: Path) -> Why:
    """Return what became of the run in `path`. Raises ConfigError if that is no run, or has a file that no run can have written."""
    state, every = read_state_and_events(path)
    run = RunDirectory(path)
    events = _this_launch(run, every)
    failures = failures_of(events)
    silent_s, usual_s, limit_s = _silence(run, state, events)
    verdict = _verdict(state, events, silent_s > limit_s)
    problem = _problem(run, failures[-1], has_gone_on=_has_gone_on(events)) if failures else None
    if problem is None and state.error and verdict == "failed":
        problem = _of_result(state)
    saves = [event for event in events if event["event"] in ("save_failed", "checkpoint_saved")]
    failed = [
        f"{event['checkpoint']}: {_text(event.get('cause'))}" for event in saves if event["event"] == "save_failed"
    ]
    end: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] in _ENDS), {})
    return Why(
        state=state, verdict=verdict, problem=problem, num_failures=len(failures),
        num_restarts=sum(event["event"] == "restarted" for event in events),
        resumed_at=_resumed_at(events), failed_saves=failed, has_saved_since=bool(saves) and saves[-1]["event"] == "checkpoint_saved",
        nodes=_nodes(events), damaged=_damaged(run), deleted=_deleted(events), stopped_by=_signal_name(end.get("signal")), stop_reason=_text(end.get("stop_reason")),
        silent_s=silent_s, usual_s=usual_s,
        launcher=_launcher(run), is_rank_0=_is_rank_0(run, events), fix=_fix(problem, verdict),
    )  # fmt: skip


def _this_launch(run: RunDirectory, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events since the last launch of the run, or since its last fit began.

    The time of the lock is the begin of the last launch, because each launch writes the lock again. In a copy of a run, the lock is
    newer than all events. A launch then begins with `started` without a restart, or with the first failure after an end.
    """
    begun = _locked_at(run)
    recent = [event for event in events if event["time"] >= begun] if begun else []
    begin, end = 0, ""
    for index, event in enumerate(recent or events):
        kind = event["event"]
        is_another = kind in (*FAILURES, *_ENDS) and (end in _ENDS or (end in FAILURES and not recent))
        if (kind == "started" and not event.get("restart_count")) or is_another:
            begin = index
        end = kind if kind in _ENDS or (kind in FAILURES and not _goes_on(event)) else ""
    return (recent or events)[begin:]


def _locked_at(run: RunDirectory) -> float:
    """Return when the last launch took the lock, in seconds since the epoch, or 0 if that is not known."""
    try:
        return (run.path / ".lock").stat().st_mtime
    except OSError:
        return 0.0


def _goes_on(event: Mapping[str, Any]) -> bool:
    """Return whether the run goes on after a failure."""
    return str(event.get("then", "")).startswith(("restarting", "going on"))


def _has_gone_on(events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether another attempt has begun after the newest failure."""
    kinds = [event["event"] for event in events if event["event"] in (*FAILURES, *STARTS)]
    return bool(kinds) and kinds[-1] in STARTS


def _verdict(state: RunState, events: Sequence[Mapping[str, Any]], is_silent: bool) -> str:
    last = next((event for event in reversed(events) if event["event"] in (*FAILURES, *_ENDS)), None)
    if state.status == "finished" and last is not None and last["event"] in FAILURES and not _goes_on(last):
        return "failed"  # the script failed after the fit had finished
    if not state.is_over and is_silent:
        return STANDING
    return state.status


def _problem(run: RunDirectory, event: Mapping[str, Any], *, has_gone_on: bool) -> Problem:
    rank, node, location = event.get("rank"), str(event.get("node", "")), _text(event.get("place"))
    cause, stacks = _text(event.get("cause")), ""
    if event.get("kind") == "error":  # all ranks may have raised it, so only its text shows which rank it concerns
        rank = int(found[1]) if (found := _RANK.search(cause)) else None
    if event.get("kind") == "hang":
        if cause.startswith("ranks "):  # none of them could be singled out
            rank, node = None, ""
        before, _, where = cause.partition(STACKS)
        where, _, rest = where.partition("; ")
        cause = before.replace(f", it is at {location}", "") + (f"; {rest}" if rest else "")
        place = found[0] if (found := _PLACE.search(where)) else ""
        kept = Path(where.removesuffix(place)).name
        stacks = f"logs/{kept}{place * (not (run.logs / kept).exists())}" if where else ""
    log = f"logs/rank-{rank}.log" if rank is not None and (run.logs / f"rank-{rank}.log").exists() else ""
    return Problem(
        time=event["time"], cause=_short(cause) or "the cause is not known", rank=rank, node=node, kind=_text(event.get("kind")),
        step=event.get("in_step"), phase=_text(event.get("phase")), location=location, then=_text(event.get("then")), stacks=stacks, log=log,
        last_output=last_line(run.path / log) if log and event.get("kind") in ("signal", "exit") and not has_gone_on else "",
        has_gone_on=has_gone_on,
    )  # fmt: skip


def _short(cause: str) -> str:
    """Return a cause in one line. A long one, such as an error of a loader process with its traceback, keeps its first and last line."""
    lines = [line.strip() for line in cause.splitlines() if line.strip()]
    return " ".join(lines) if len(lines) < _LONG else f"{lines[0]} ... {lines[-1]}"


def _of_result(state: RunState) -> Problem:
    """Return the failure that only result.json has, because another launcher started the workers."""
    return Problem(
        state.changed, _short(_text(state.error)), None, "", "", None, "", "", "", "", "", "", has_gone_on=False
    )


def _text(value: Any) -> str:
    return str(value)[:_MOST_TEXT] if isinstance(value, str) else ""


def _signal_name(number: Any) -> str:
    if not isinstance(number, int):
        return ""
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return str(number)


def _resumed_at(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the step at which the workers went on after each restart."""
    return [event.get("step", 0) for event in events if event["event"] == "started" and event.get("restart_count")]


def _nodes(events: Sequence[Mapping[str, Any]]) -> list[str]:
    found: dict[str, str] = {}
    lost: dict[str, str] = {}
    for event in events:
        node = str(event.get("node", ""))
        if event["event"] == "node_lost":
            stopped = _STOPPED.search(_text(event.get("cause")))
            found[node] = lost[node] = stopped[1] if stopped else "was lost"
        elif event["event"] == "node_joined":
            found[node] = f"{lost[node]} and has joined again" if node in lost else "joined"
    return [f"node {node} {what}" for node, what in found.items()]


def _damaged(run: RunDirectory) -> list[str]:
    try:
        return sorted(path.name for path in run.checkpoints.glob("damaged-step-*"))
    except OSError:
        return []


def _deleted(events: list[dict[str, Any]]) -> list[str]:
    return [Path(_text(event.get("path"))).name for event in events if event["event"] == "checkpoints_deleted"]


def _fix(problem: Problem | None, verdict: str) -> str:
    if verdict == STANDING:
        return " ".join(STANDING_STILL)
    return "" if problem is None else fix_of(problem.cause)


def _launcher(run: RunDirectory) -> str:
    """Return the launcher that the lock of the directory names, whether it runs or not."""
    for name in (".lock", ".part"):
        with contextlib.suppress(OSError, LimitError), open_regular(run.path / name) as file:
            return file.read(256).decode(errors="replace").strip().rpartition("\n")[2]
    return ""


def _is_rank_0(run: RunDirectory, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether rank 0 has locked the directory itself, which it does if another launcher started the ranks."""
    if run.part_of or not any(event["event"] == "started" for event in events):
        return False
    sources = _recorded(run).get("sources") or {}
    return "launcher" in sources.values() or not any(run.logs.glob("rank-*.log"))


# ------------------------------------------------------------------ signs of life


def _silence(
    run: RunDirectory, state: RunState, events: Sequence[Mapping[str, Any]]
) -> tuple[float, float | None, float]:
    """Return (seconds since the last sign of progress, usual seconds between log lines, limit above which a run stands still).

    Clocks of several machines may differ, and a clock may be set back. A time in the future therefore counts as now.
    """
    times = _times_of_rows(run)
    last = max([*times[-1:], *(event["time"] for event in events[-1:])], default=state.changed)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False) if later > earlier]
    usual_s = statistics.median(gaps) if gaps else None
    return max(0.0, time.time() - last), usual_s, max(_limit_s(run, bool(times)), _USUAL * max(gaps, default=0.0))


def _limit_s(run: RunDirectory, has_begun: bool) -> float:
    """Return the seconds without progress after which a run stands still, in an update or before the first one."""
    own, slow = (_recorded(run).get(name) for name in ("hang_timeout", "hang_timeout_slow"))
    usual_s = float(own) if is_number(own) and own and own > 0 else _HANG_TIMEOUT_S
    if has_begun:
        return usual_s
    if slow is None or not is_number(slow):
        return _SLOW * usual_s
    return float(slow) if slow > 0 else math.inf


def _recorded(run: RunDirectory) -> Mapping[str, Any]:
    """Return the settings of the run, or nothing if they cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_recorded(run.path / "config.yaml")
    return {}


def _times_of_rows(run: RunDirectory) -> list[float]:
    """Return the times of the newest log lines, in order."""
    times = []
    for line in tail(run.metrics):
        with contextlib.suppress(ValueError):
            check_kinds(row := parse_json(line), {"time": SECONDS, "step": COUNT})
            if "time" in row:
                times.append(float(row["time"]))
    return times
