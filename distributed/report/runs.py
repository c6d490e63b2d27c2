"""Read the files in the directory of a run, even while the run is active or after it was killed. Loads no framework."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.config.json_lines import METRICS, METRICS_MEMORY, Memory, json_lines
from distributed.config.kinds import COUNT, MAX_COUNT, SECONDS, SHORT_TEXT, Kind, is_number, optional
from distributed.config.reading import LimitError
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.runs.recorded import read_recorded
from distributed.runs.summary import read_result

Record = dict[str, Any]
_LOGGED = {"step": SECONDS, "time": SECONDS}
_MEDIUM = {"path": SHORT_TEXT, "name": SHORT_TEXT, "kind": SHORT_TEXT, "step": SECONDS, "time": SECONDS}
_RANK = optional(COUNT)
_MOST_NAMES = 20_000  # of metrics and parts of times
MOST_MEDIA = 1000  # names of images, texts and the like that are read
# Names in a record that are not metrics.
POSITION = frozenset({"step", "epoch", "time"})


@dataclasses.dataclass(frozen=True)
class RunData:
    """One run as read from its files. Times are in seconds since the first record or event of the run."""

    path: Path
    label: str
    train: Sequence[Record]  # one per log line
    val: Sequence[Record]  # one per validation
    times: Sequence[Record]  # one per log line: the seconds that the parts of an update took
    events: Sequence[Record]  # with the step at which each happened
    result: Mapping[str, Any]
    settings: Mapping[str, Any]
    sources: Mapping[str, str]
    hyperparameters: Mapping[str, Any]
    script: str | None
    media: Sequence[Record]  # the newest image, text or the like of each name and rank, of up to MOST_MEDIA names

    @property
    def world_size(self) -> int:
        """Number of processes, 0 if unknown."""
        return int(self.result.get("world_size") or 0)

    @functools.cached_property
    def by_name(self) -> tuple[Mapping[str, Sequence[Record]], Mapping[str, Sequence[Record]]]:
        """For each metric, the records of training and those of validations that have it."""
        return _by_name(self.train), _by_name(self.val)

    @property
    def num_nodes(self) -> int:
        return int(self.result.get("num_nodes") or 1)

    @property
    def backend(self) -> str:
        return str(self.result.get("backend") or "")

    @property
    def status(self) -> str:
        return str(self.result.get("status") or "unknown")

    @property
    def samples_per_second(self) -> float:
        """Throughput of the whole run."""
        return float(self.result.get("samples_per_second") or 0.0)


def read_run(path: Path, label: str | None = None) -> RunData:
    """Return the run in the directory `path`.

    Args:
        path: a run directory.
        label: the name of the run on the page; by default the name of the directory.

    Raises:
        ConfigError: `path` is not a run directory, cannot be read or has no metrics yet.
    """
    run = RunDirectory(path)
    _check(run)
    memory = Memory(METRICS_MEMORY)
    try:
        train, val = _read_metrics(run.metrics, memory)
        times = [memory.take(_seconds(record)) for record in _records(run.times, _LOGGED)]
        if memory.num_names > _MOST_NAMES:
            raise LimitError(f"has {memory.num_names} different names, {_MOST_NAMES} are allowed")
        events, media = run.read_events(), _newest_media(run.media)
    except OSError as error:
        raise ConfigError(f"run {str(path)!r} cannot be read ({error.strerror}): check its permissions") from None
    except LimitError as error:
        raise ConfigError(f"run {str(path)!r} cannot be read (a file {error}): name another") from None
    records = (*train, *val)
    if not records:
        raise ConfigError(
            f"run {str(path)!r} has no metrics yet: wait for its first log line (see log_every_n_steps), or name another run"
        )
    began = min(record["time"] for record in (*train[:1], *val[:1], *events[:1]))
    for record in (*records, *times, *events):
        record["time"] -= began
    config = read_recorded(path / "config.yaml")
    return RunData(
        path=path, label=label or path.resolve().name, train=train, val=val,
        times=times, events=_at_steps(_with_new_sizes(events), records), result=read_result(path / "result.json") or {},
        sources=config.pop("sources", None) or {}, script=config.pop("script", None),
        hyperparameters=config.pop("hyperparameters", None) or {}, settings=config, media=media,
    )  # fmt: skip


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Return several runs. Each is labelled with the shortest end of its path that distinguishes it from the others."""
    return [read_run(path, label) for path, label in zip(paths, labels(paths), strict=True)]


def labels(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as few as are needed so that no two paths look the same."""
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        twice = next(path for path, its in zip(paths, parts, strict=True) if parts.count(its) > 1)
        raise ConfigError(f"run {str(twice)!r} is named twice: name each run once")
    count = 1
    while len({its[-count:] for its in parts}) < len(parts):
        count += 1
    return ["/".join(its[-count:]) for its in parts]


def _check(run: RunDirectory) -> None:
    """Raise ConfigError if `run` is not a run directory that can be read and has metrics."""
    path = run.path
    if not path.exists():
        raise ConfigError(f"run {str(path)!r} does not exist: name a run directory, or a run in ./runs")
    if not path.is_dir():
        raise ConfigError(f"run {str(path)!r} is not a directory: name the run directory, not a file of it")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"run {str(path)!r} cannot be read (Permission denied): check its permissions")
    if run.metrics.exists():
        return
    if part := run.part_of:
        raise ConfigError(
            f"run {str(path)!r} has no metrics, only the logs of {part}: run this command on node 0, which has the metrics"
        )
    if run.events.exists() or (path / "config.yaml").exists():
        raise ConfigError(
            f"run {str(path)!r} has no metrics: only runs of a Trainer have metrics, from their first log line on; RUN/logs has the output of the run"
        )
    inside = sorted(each.parent.name for each in path.glob("*/metrics.jsonl"))
    hint = f"it contains runs, such as {str(path / inside[-1])!r}: name" if inside else "name"
    raise ConfigError(
        f"{str(path)!r} is not a run directory (it has no metrics.jsonl): {hint} a run, or a sweep's directory"
    )


def _read_metrics(path: Path, memory: Memory) -> tuple[list[Record], list[Record]]:
    """Return the records of training, and those of validations."""
    train: list[Record] = []
    val: list[Record] = []
    for record in _records(path, _LOGGED):
        (val if record.get("split") == "val" else train).append(memory.take(_metrics(record)))
    return train, val


def _by_name(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        for name in record:
            if name not in POSITION:
                found.setdefault(name, []).append(record)
    return found


def _newest_media(path: Path) -> list[Record]:
    """Return the newest record of each name and rank, of the first `MOST_MEDIA` of them."""
    newest: dict[tuple[str, int | None], Record] = {}
    for record in _records(path, _MEDIUM):
        key = name, rank = record["name"], record.get("rank")
        if _RANK.holds(rank) and (key in newest or len(newest) < MOST_MEDIA):
            newest[key] = {"name": name, "rank": rank, **{each: record[each] for each in _MEDIUM}}
    return list(newest.values())


def _records(path: Path, kinds: Mapping[str, Kind]) -> Iterator[Record]:
    """Yield the JSON objects in the lines of a file that have all names in `kinds` with values of these kinds.

    Other lines are left out, such as a line that a killed writer left incomplete. Raises OSError or LimitError.
    """
    with contextlib.suppress(FileNotFoundError):
        yield from (record for record in json_lines(path, METRICS) if _has(record, kinds))


def _has(record: Any, kinds: Mapping[str, Kind]) -> bool:
    return isinstance(record, dict) and all(name in record and kind.holds(record[name]) for name, kind in kinds.items())


def _metrics(record: Record) -> Record:
    """Return a record with only its metrics and the names in POSITION. None stands for a value that is not finite."""
    return {name: value for name, value in record.items() if value is None or is_number(value)}


def _seconds(record: Record) -> Record:
    return {name: value for name, value in record.items() if is_number(value) and abs(value) <= MAX_COUNT}


def _with_new_sizes(events: list[Record]) -> list[Record]:
    """Return the events. Each `regrouped` gets the number of processes of the next attempt, because a worker recorded the number before."""
    size = None
    for event in reversed(events):
        if event["event"] == "started":
            size = event.get("world_size")
        elif event["event"] == "regrouped" and size is not None:
            event["world_size"] = size
    return events


def _at_steps(events: list[Record], records: Sequence[Record]) -> list[Record]:
    """Return the events, each with a step: its own, or the last step that is known at its time."""
    known = sorted((each["time"], each["step"]) for each in (*records, *events) if isinstance(each.get("step"), int))
    position = step = 0
    for event in sorted(events, key=lambda event: float(event["time"])):
        while position < len(known) and known[position][0] <= event["time"]:
            step = known[position][1]
            position += 1
        event.setdefault("step", step)
    return events
