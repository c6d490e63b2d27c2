"""Read the files in the directory of a run, even while the run is active or after it was killed. Loads no framework."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.runs.recorded import read_recorded
from distributed.runs.summary import read_result

Record = dict[str, Any]
# Names in a record that are not metrics.
POSITION = frozenset({"step", "epoch", "time", "split"})


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
    media: Sequence[Record]  # one per image, text or the like that was logged

    @property
    def world_size(self) -> int:
        """Number of processes, 0 if unknown."""
        return int(self.result.get("world_size") or 0)

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
    try:
        records = _read_records(run.metrics)
        times, events = _read_records(run.times), _read_records(run.events, needs="event")
        media = _read_records(run.media, needs="path")
    except OSError as error:
        raise ConfigError(f"run {str(path)!r} cannot be read ({error.strerror}): check its permissions") from None
    if not records:
        raise ConfigError(
            f"run {str(path)!r} has no metrics yet: wait for its first log line (see log_every_n_steps), or name another run"
        )
    began = min(record["time"] for record in (*records[:1], *events[:1]))
    for record in (*records, *times, *events):
        record["time"] -= began
    config = read_recorded(path / "config.yaml")
    return RunData(
        path=path, label=label or path.resolve().name,
        train=[record for record in records if record.get("split") != "val"], val=[record for record in records if record.get("split") == "val"],
        times=times, events=_at_steps(events, records), result=read_result(path / "result.json") or {},
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
        raise ConfigError(f"run {str(path)!r} does not exist: name a run directory")
    if not path.is_dir():
        raise ConfigError(f"run {str(path)!r} is not a directory: name the run directory, not a file of it")
    if not os.access(path, os.R_OK | os.X_OK):
        raise ConfigError(f"run {str(path)!r} cannot be read (Permission denied): check its permissions")
    if run.metrics.exists():
        return
    if run.events.exists() or (path / "config.yaml").exists():
        raise ConfigError(
            f"run {str(path)!r} has no metrics: only runs of a Trainer have metrics, from their first log line on; RUN/logs has the output of the run"
        )
    inside = sorted(each.parent.name for each in path.glob("*/metrics.jsonl"))
    hint = f"it holds {len(inside)}, as {str(path / inside[-1])!r}: name" if inside else "name"
    raise ConfigError(
        f"{str(path)!r} is not a run directory (it has no metrics.jsonl): {hint} a run, or a search's directory"
    )


def _read_records(path: Path, needs: str = "step") -> list[Record]:
    """Return the JSON objects of the lines that have `needs`, a time and, if they have a step, a numeric one.

    Other lines are left out, such as a line that a killed writer left incomplete.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [
        record
        for record in _parsed(lines)
        if isinstance(record, dict)
        and needs in record
        and _is_finite(record.get("time"))
        and _is_finite(record.get("step", 0))
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _parsed(lines: Sequence[bytes]) -> Iterator[Any]:
    """Yield the value of each line that is JSON.

    A file without incomplete lines is parsed at once, which is twice as fast.
    """
    try:
        yield from json.loads(b"[" + b",".join(lines) + b"]")
        return
    except ValueError:
        pass
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


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
