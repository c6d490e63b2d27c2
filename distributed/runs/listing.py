"""Read the state of a run from the files in its directory, even while the run is active. It reads little, for lists of runs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.config.kinds import COUNT, check_kinds, optional
from distributed.config.reading import LimitError, open_regular, parse_json
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.runs.failures import last_failure_of
from distributed.runs.nested import holder_of
from distributed.runs.summary import read_result

_TAIL_BYTES = 64 * 1024  # of metrics.jsonl, more than its last line
UNREADABLE = "unreadable"  # status of a run
_FILES = ("events.jsonl", "result.json", "config.yaml")
# How a part of a run has ended, by the last event of its node.
# Nothing comes after `regrouped` on a node that a signal stopped, so that the run goes on without it.
_ENDS = {
    "finished": "finished", "preempted": "interrupted", "regrouped": "interrupted", "worker_failed": "failed", "node_failed": "failed",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RunState:
    """A run as its files show it.

    `status` is that of result.json ("running", "finished", "failed", "interrupted"), "starting" before there is one, "killed" if a
    run that had not ended has no process any more, or "unreadable" if a file of the run cannot be read, with the reason as `error`.
    Times are in seconds since the epoch.
    """

    path: Path
    status: str
    backend: str
    num_nodes: int
    world_size: int
    step: int
    epoch: int  # of the newest update, from 1; 0 before the first update
    best: Mapping[str, float]  # the best value of each metric
    final: Mapping[str, float]  # the last row
    total_time: float | None  # seconds of training, None before the first checkpoint
    samples_per_second: float | None
    began: float  # the first event, or the time of the directory
    changed: float  # the newest change of its files
    checkpoint: str | None  # relative to the run directory
    error: str | None
    restarts: int
    host: str  # the other machine on which the run goes on, or ""
    # The node whose part of the run this is, such as "node 1 of a run of 10.0.0.1"; "" for the run itself.
    part_of: str = ""
    ranks: tuple[int, ...] = ()  # ranks that have a log here, for a part of a run only

    @property
    def is_over(self) -> bool:
        """Return whether no process works on the run."""
        return self.status not in ("running", "starting")


def list_runs(directory: Path) -> list[RunState]:
    """Return the runs in `directory`, the newest first, or the run that `directory` itself is.

    Raises ConfigError if there is no such directory, or if it is that of another node than node 0.
    """
    if not directory.is_dir():
        raise ConfigError(f"{str(directory)!r} is not a directory: name one that holds runs")
    if part := RunDirectory(directory).part_of:
        raise ConfigError(
            f"{str(directory)!r} has the logs of {part}: run this command on node 0, or show this part with 'distributed status'"
        )
    if _is_run(directory):
        return [read_state_of(directory)]
    runs = [path for path in directory.iterdir() if path.is_dir() and _is_run(path) and not RunDirectory(path).part_of]
    found = [_listed(path) for path in runs]
    return sorted(found, key=lambda run: -run.began)


def _listed(path: Path) -> RunState:
    """Return the state of the run in `path`, with the status `UNREADABLE` if it cannot be read."""
    try:
        return read_state_of(path)
    except ConfigError as error:
        return RunState(
            path=path, status=UNREADABLE, backend="", num_nodes=1, world_size=0, step=0, epoch=0, best={}, final={}, total_time=None,
            samples_per_second=None, began=path.stat().st_mtime, changed=path.stat().st_mtime, checkpoint=None, error=str(error),
            restarts=0, host="",
        )  # fmt: skip


def read_state_of(path: Path) -> RunState:
    """Return the state of the run in `path`. In the directory of a node other than node 0, it is the state known to that node.

    Raises ConfigError if `path` is not a run directory, or has a file that no run can have written.
    """
    return read_state_and_events(path)[0]


def read_state_and_events(path: Path) -> tuple[RunState, list[dict[str, Any]]]:
    """Return the state of the run in `path`, and the events from which it follows. Raises ConfigError like `read_state_of`."""
    if not _is_run(path) and not RunDirectory(path).part_of:
        what = "does not exist" if not path.exists() else "is not a run directory"
        holds_runs = path.is_dir() and any(map(_is_run, path.iterdir()))
        where = f" {shlex.quote(str(path))}' lists those in it" if holds_runs else "' lists those in ./runs"
        raise ConfigError(f"{str(path)!r} {what}: name a run, 'distributed runs{where}")
    run = RunDirectory(path)
    try:
        result, events, last = read_result(path / "result.json") or {}, run.read_events(), _last_line(run.metrics)
    except OSError as error:
        raise ConfigError(f"{error.filename!r} cannot be read ({error.strerror}): check its permissions") from None
    began = events[0]["time"] if events else path.stat().st_mtime
    starts = [index for index, event in enumerate(events) if event["event"] == "started"]
    # A failure of an earlier attempt is not reported.
    failed, holder = last_failure_of(events[starts[-1] if starts else 0 :]) or {}, holder_of(path)
    restarts, part = sum(event["event"] == "restarted" for event in events), run.part_of
    if part:
        holder = run.part_holder()
        result = _result_of_part(events, is_running=bool(holder) and not _other_host(holder)) | result
        restarts = int(result.get("restarts") or 0)
    state = RunState(
        path=path, status=_status(result, holder), backend=str(result.get("backend") or ""), num_nodes=int(result.get("num_nodes") or 1),
        world_size=int(result.get("world_size") or 0), step=max(int(result.get("steps") or 0), int(last.get("step") or 0)),
        epoch=0 if part else _epoch_of(result, last),
        best=_known(result.get("best_metrics")), final=_known(result.get("final_metrics")), total_time=result.get("total_time"),
        samples_per_second=result.get("samples_per_second"),
        began=began, changed=max([began, *_times(path)]), checkpoint=result.get("checkpoint"), error=result.get("error") or failed.get("cause"),
        restarts=restarts, host=_other_host(holder), part_of=part, ranks=_ranks_of(run) if part else (),
    )  # fmt: skip
    return state, events


def _epoch_of(result: Mapping[str, Any], last: Mapping[str, Any]) -> int:
    """Return the epoch of the newest update as the console shows it: from 1, or 0 before the first update.

    `last` is the newest line of metrics.jsonl. Its `epoch` and the `epochs` of `result` count finished epochs. The last line of an
    epoch is written before its end is counted. A row of `final_metrics` already counts as the console does.
    """
    steps, logged, row = int(result.get("steps") or 0), int(last.get("step") or 0), result.get("final_metrics") or {}
    if (row.get("step") or 0) >= max(steps, logged):
        return int(row.get("epoch") or 0)
    return 1 + int(last.get("epoch") or 0) if logged >= steps else 1 + int(result.get("epochs") or 0)


def _result_of_part(events: Sequence[Mapping[str, Any]], *, is_running: bool) -> dict[str, Any]:
    """Return the facts in the journal of a node other than node 0, under the names of result.json."""
    started: Mapping[str, Any] = next((event for event in reversed(events) if event["event"] == "started"), {})
    end = next((event["event"] for event in reversed(events) if event["event"] in ("started", *_ENDS)), "")
    open_status = "running" if started else "starting"
    return {
        "status": open_status if is_running else _ENDS.get(end, open_status), "backend": started.get("backend"),
        "num_nodes": started.get("num_nodes"), "world_size": started.get("world_size"), "restarts": started.get("restart_count"),
        "steps": max((int(event.get("step") or 0) for event in events), default=0),
    }  # fmt: skip


def _ranks_of(run: RunDirectory) -> tuple[int, ...]:
    return tuple(sorted(int(log.stem.removeprefix("rank-")) for log in run.logs.glob("rank-*.log")))


def _is_run(path: Path) -> bool:
    """Return whether the directory is that of a run. A config.yaml alone may be one that a user wrote."""
    events, result, config = (path / name for name in _FILES)
    return events.exists() or result.exists() or (config.exists() and RunDirectory(path).was_locked)


def _known(values: Mapping[str, float | None] | None) -> dict[str, float]:
    return {name: value for name, value in (values or {}).items() if value is not None}


def _status(result: Mapping[str, Any], holder: str) -> str:
    status = str(result.get("status") or "starting")
    if status not in ("running", "starting"):
        return status
    return status if holder else "killed"


def _other_host(holder: str) -> str:
    _, _, host = holder.partition(" on ")
    return "" if host in ("", socket.gethostname()) else host


def _last_line(path: Path) -> dict[str, Any]:
    """Return the newest complete JSON object of the file, or {}."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except (OSError, LimitError):
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = parse_json(line)
            check_kinds(found, {"step": optional(COUNT), "epoch": optional(COUNT)})
            return dict(found)
    return {}


def _times(path: Path) -> list[float]:
    times = []
    for name in (*_FILES, "metrics.jsonl"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return times
