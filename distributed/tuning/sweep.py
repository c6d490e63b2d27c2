"""The files of a sweep: a journal of all trials, and what came of them as `sweep.json` and `best.yaml`.

DIR/sweep.yaml      what was asked for
DIR/trials.jsonl    the journal: one line for each thing that happened, from which everything else is made
DIR/trials/00000/   the run directory of a trial; 00000.log beside it is what it wrote
DIR/sweep.json      metric, mode, each trial with its configuration and metrics, the best one
DIR/best.yaml       the best trial's settings, for `train --config`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import replace_text
from distributed.config.merging import Typed, split_sweep
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.tuning.space import Space

Row = Mapping[str, Any]
OPEN = ("running", "waiting")  # of a trial that has not come to its end


@dataclasses.dataclass
class Record:
    """What is known of a trial."""

    number: int
    config: dict[str, Any]
    status: str = "running"  # "finished", "stopped" (early), "failed", "interrupted"; "waiting" before it goes on
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    configs: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each row, as schedulers change them
    error: str | None = None
    seconds: float = 0.0  # of work
    cloned: int | None = None  # the trial whose state it took over last
    since: float | None = None  # when it last began to work

    @property
    def name(self) -> str:
        return f"{self.number:05d}"

    @property
    def epochs(self) -> int:
        """Epochs that it trained, or reports where nothing counts epochs."""
        return max((int(row.get("epoch", number + 1)) for number, row in enumerate(self.rows)), default=0)

    def best_row(self, metric: str, mode: str) -> dict[str, Any] | None:
        """The row in which the metric was best."""
        best = self._best_index(metric, mode)
        return None if best is None else self.rows[best]

    def best_config(self, metric: str, mode: str) -> dict[str, Any]:
        """The values with which it was best, or those of now."""
        best = self._best_index(metric, mode)
        return self.config if best is None else self.configs[best]

    def _best_index(self, metric: str, mode: str) -> int | None:
        scores = [score_of(row, metric, mode) for row in self.rows]
        best = min(scores, default=math.inf)
        return scores.index(best) if best < math.inf else None


def _recalled(config: Mapping[str, Any], space: Space) -> dict[str, Any]:
    return {name: space[name].recalled(value) if name in space else value for name, value in config.items()}


def score_of(row: Row, metric: str, mode: str) -> float:
    """The metric as a number of which the smallest is best; infinity where it is missing or not a number."""
    value = row.get(metric)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return math.inf
    return float(value if mode == "min" else -value)


class Sweep:
    """All trials of one search, in memory and on disk. One process writes."""

    def __init__(self, directory: Path, metric: str, mode: str) -> None:
        self.directory, self.metric, self.mode = directory, metric, mode
        self.records: dict[int, Record] = {}
        self.run = RunDirectory(directory)  # held while trials run

    @property
    def journal(self) -> Path:
        return self.directory / "trials.jsonl"

    @property
    def all(self) -> list[Record]:
        """The trials of now. A thread that shows them meets no change while it looks."""
        return list(self.records.values())

    def trial_dir(self, number: int) -> Path:
        """The run directory of a trial."""
        return self.directory / "trials" / f"{number:05d}"

    # ------------------------------------------------------------------ what happens

    def note(self, number: int, event: str, **detail: Any) -> None:
        """Something happened to a trial: "started", "row", "ended"."""
        line = {"trial": number, "event": event, "time": time.time(), **detail}
        self.apply(line)
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def apply(self, line: Mapping[str, Any]) -> None:
        """Take in one line of the journal; none of a trial whose beginning was lost."""
        number, event = line["trial"], line["event"]
        if event == "started":
            record = self.records.setdefault(number, Record(number, dict(line["config"])))
            record.config, record.status, record.error = dict(line["config"]), "running", None
            record.since = line["time"]
        if number not in self.records:
            return
        record = self.records[number]
        if event != "started" and record.since is not None:
            record.seconds += line["time"] - record.since
            record.since = line["time"] if event == "row" else None
        if event == "row":
            record.configs.append(record.config)
            record.rows.append(dict(line["row"]))
            record.cloned = line.get("cloned", record.cloned)
        elif event == "ended":
            record.status, record.error = line["status"], line.get("error")

    def read(self) -> None:
        """What an earlier process wrote. Trials that it did not end go on."""
        content = self.journal.read_text(encoding="utf-8", errors="replace") if self.journal.exists() else ""
        for text in content.splitlines():
            # Half a line of a killed writer is no JSON, and another hand may have written any.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self.apply(json.loads(text))
        if content and not content.endswith("\n"):  # what is written next is a line of its own
            with self.journal.open("a", encoding="utf-8") as file:
                file.write("\n")
        for record in self.records.values():
            record.since = None
            if record.status in (*OPEN, "interrupted"):
                record.status = "waiting"

    def recall(self, space: Space) -> None:
        """Values as the space has them: of a journal that was read they are those of JSON."""
        for record in self.all:
            record.config = _recalled(record.config, space)
            record.configs = [_recalled(config, space) for config in record.configs]

    # ------------------------------------------------------------------ what came of it

    def score(self, record: Record) -> float:
        """The best value that it reached; the smaller the better, infinity where it reached none."""
        return min((score_of(row, self.metric, self.mode) for row in record.rows), default=math.inf)

    def best(self) -> Record | None:
        """The trial that reached the best value; one that failed afterwards counts where no other has a value."""
        known = [record for record in self.records.values() if self.score(record) < math.inf]
        return min(
            known, key=lambda record: (record.status == "failed", self.score(record), record.number), default=None
        )

    @property
    def trial_hours(self) -> float:
        """Hours of work, all trials together."""
        now = time.time()
        working = sum(now - since for record in self.all if (since := record.since) is not None)
        return (sum(record.seconds for record in self.all) + working) / 3600

    def summary(self) -> dict[str, Any]:
        """The content of sweep.json."""
        best = self.best()
        trials = [self._summary_of(self.records[number]) for number in sorted(self.records)]
        return {
            "metric": self.metric, "mode": self.mode, "trial_hours": self.trial_hours, "trials": trials,
            "best": next((trial for trial in trials if best is not None and trial["id"] == best.name), None),
        }  # fmt: skip

    def _summary_of(self, record: Record) -> dict[str, Any]:
        row = record.best_row(self.metric, self.mode) or (record.rows[-1] if record.rows else {})
        content = {
            "id": record.name, "config": record.best_config(self.metric, self.mode),
            "metrics": {name: _plain(value) for name, value in row.items()}, "status": record.status,
            "epochs": record.epochs, "seconds": record.seconds, "run_dir": str(Path("trials", record.name)),
        }  # fmt: skip
        return content | ({} if record.error is None else {"error": record.error})

    def write(self) -> None:
        """sweep.json, whole or not at all."""
        replace_text(self.directory / "sweep.json", json.dumps(self.summary(), indent=1, default=str) + "\n")

    def write_best(self, typed: Typed) -> Path | None:
        """best.yaml: `typed`, what all trials had, with the values of the best one. None where no trial has a value."""
        import yaml

        best = self.best()
        if best is None:
            return None
        settings, others, _ = split_sweep(best.best_config(self.metric, self.mode))
        flags = {**typed.file, **typed.flag, **settings}
        content: dict[str, Any] = {}
        if typed.script is not None:
            content = {"script": typed.script, "script_args": [*typed.script_args, *as_arguments(others)]}
        content |= flags
        if others and typed.script is None:
            content["hyperparameters"] = others
        content["sources"] = _sources(typed, settings)
        head = f"# The best of {len(self.records)} trials: {self.metric} {_plain(self._best_value(best))}, trial {best.name}.\n"
        text = yaml.safe_dump(_as_yaml(content), sort_keys=False, default_flow_style=False, allow_unicode=True)
        path = self.directory / "best.yaml"
        replace_text(path, head + text)
        return path

    def _best_value(self, record: Record) -> Any:
        return (record.best_row(self.metric, self.mode) or {}).get(self.metric)

    def interrupt(self) -> None:
        """Trials that did not come to their end were cut off."""
        for record in self.records.values():
            if record.status in OPEN:
                self.note(record.number, "ended", status="interrupted")


def _sources(typed: Typed, settings: Mapping[str, Any]) -> dict[str, str]:
    """Who said what, as in a run's config.yaml: what was swept is as strong as a flag."""
    sources: dict[str, str] = {}
    for layer, given in (("file", typed.file), ("flag", {**typed.flag, **settings})):
        for name, value in given.items():
            sources[name] = layer
            if isinstance(value, Mapping):
                sources.update({f"{name}.{option}": layer for option in value})
    return sources


def as_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """What is no setting, as a script's arguments: `--name value`."""
    return tuple(word for name, value in values.items() for word in (f"--{name}", _text(value)))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for both."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _as_yaml(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_yaml(inner) for inner in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


# ------------------------------------------------------------------ a sweep that goes on


def open_sweep(directory: Path, metric: str, mode: str, asked: Mapping[str, Any], resume: bool) -> Sweep:
    """The sweep in `directory`, held by this process; where `resume` says so with what an earlier one left.

    `asked` is what makes it this sweep and no other. Raises ConfigError where the directory holds another one.
    """
    import yaml

    file, sweep = directory / "sweep.yaml", Sweep(directory, metric, mode)
    others = {entry.name for entry in directory.iterdir()} - {".lock"} if directory.is_dir() else set()
    if resume and not directory.exists():
        raise ConfigError(
            f"run directory {str(directory)!r} does not exist, and a resume goes on with a sweep: correct run_dir (--run-dir), or"
            " drop resume (--resume) to start a new one"
        )
    if resume and others and not file.exists():
        raise ConfigError(f"run directory {str(directory)!r} holds no sweep to resume: name another with --run-dir")
    sweep.run.check(resume=resume)
    text = yaml.safe_dump(_as_yaml({"metric": metric, "mode": mode, **asked}), sort_keys=False)
    if resume and file.exists():
        _check_same(_asked_before(file), yaml.safe_load(text), directory)
    sweep.run.lock()
    sweep.read()
    (directory / "trials").mkdir(exist_ok=True)
    for record in sweep.records.values():  # what a trial reported and nobody wrote down is to come again
        last = sweep.trial_dir(record.number).with_name(f"{record.name}.last.json")
        last.unlink(missing_ok=True)
        if record.rows:
            replace_text(last, json.dumps(record.rows[-1]))
    replace_text(file, text)
    return sweep


def _asked_before(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_bytes())
    except (OSError, yaml.YAMLError):
        content = None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file} is damaged, so what was asked is not known: begin anew with another --run-dir")
    return content


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """A sweep that goes on is the same one, of as many trials or more."""
    for name in {**now, **before}:  # as typed: what follows from another comes behind it
        one, other = before.get(name), now.get(name)
        if name == "num_samples":
            if int(one or 0) > int(other or 0):
                raise ConfigError(
                    f"num_samples={other} is less than the {one} of the sweep in {directory}: set {one} or more"
                )
        elif one != other:
            raise ConfigError(
                f"{name}={_short(other)} is not the {_short(one)} of the sweep in {directory}: give it that, or begin anew with"
                " another --run-dir"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def scores(sweep: Sweep) -> Sequence[tuple[Record, float | None]]:
    """Every trial in order, with its score once it has come to an end."""
    records = [sweep.records[number] for number in sorted(sweep.records)]
    return [(record, None if record.status in OPEN else sweep.score(record)) for record in records]
