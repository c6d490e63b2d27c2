"""Files of a sweep: a journal of all trials, and the result as `sweep.json` and `best.yaml`.

DIR/sweep.yaml      configuration of the sweep
DIR/trials.jsonl    journal with one line for each event; everything else is made from it
DIR/trials/00000/   run directory of a trial; 00000.log beside it holds the output of the trial
DIR/sweep.json      metric, mode, each trial with its configuration and metrics, the best trial
DIR/best.yaml       settings of the best trial, for `train --config`
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import replace_text
from distributed.config.json_lines import JOURNAL, JOURNAL_MEMORY, Memory, json_lines
from distributed.config.kinds import COUNT, OBJECT, SECONDS, TEXT, check_kinds, optional
from distributed.config.merging import Overrides, joined, split_sweep
from distributed.config.reading import MAX_YAML_BYTES, LimitError, parse_yaml, read_bytes
from distributed.errors import ConfigError
from distributed.runs.directory import RunDirectory
from distributed.state import EpochMetrics
from distributed.tuning.space import Space

OPEN = ("running", "waiting")  # states of a trial that has not ended
_LINE = {  # of the journal
    "trial": COUNT, "event": TEXT, "time": SECONDS, "config": OBJECT, "row": OBJECT, "cloned": optional(COUNT), "status": TEXT,
    "error": optional(TEXT),
}  # fmt: skip
_ROW = {"epoch": SECONDS, "validations": SECONDS}


@dataclasses.dataclass
class TrialRecord:
    """State of one trial, as the journal describes it."""

    number: int
    config: dict[str, Any]
    status: str = "running"  # or "finished", "stopped" (early), "failed", "interrupted", "waiting" (to be continued)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    # the values of each row; a scheduler may change them between rows
    configs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0  # time during which the trial was running
    cloned: int | None = None  # number of the trial whose state this trial took over last
    since: float | None = None  # when the trial last began to run, in seconds since the epoch

    @property
    def name(self) -> str:
        return f"{self.number:05d}"

    @property
    def epochs(self) -> int:
        """Number of epochs that were trained, or of reports if no report counts epochs."""
        return max((int(row.get("epoch", number + 1)) for number, row in enumerate(self.rows)), default=0)

    def best_row(self, metric: str, mode: str) -> dict[str, Any] | None:
        """Return the row with the best value of the metric, or None if no row has a finite value."""
        best = self._best_index(metric, mode)
        return None if best is None else self.rows[best]

    def best_config(self, metric: str, mode: str) -> dict[str, Any]:
        """Return the values with which the metric was best, or the present values if no row has the metric."""
        best = self._best_index(metric, mode)
        return self.config if best is None else self.configs[best]

    def _best_index(self, metric: str, mode: str) -> int | None:
        scores = [score_of(row, metric, mode) for row in self.rows]
        best = min(scores, default=math.inf)
        return scores.index(best) if best < math.inf else None


def _recalled(config: Mapping[str, Any], space: Space) -> dict[str, Any]:
    return {name: space[name].recalled(value) if name in space else value for name, value in config.items()}


def score_of(row: EpochMetrics, metric: str, mode: str) -> float:
    """Return the metric as a score of which the smallest is best. It is infinity if the metric is missing or not
    finite."""
    value = row.get(metric)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return math.inf
    return float(value if mode == "min" else -value)


def progress_of(row: EpochMetrics, number: int) -> int:
    """Return how far a trial is at this row: its number of validations if these do not follow the epochs, else of epochs.

    If the row has neither, `number` is returned, which is the number of the report, from 1.
    """
    return int(row.get("validations", row.get("epoch", number)))


class Sweep:
    """All trials of one sweep, in memory and on disk. Only one process may write."""

    def __init__(self, directory: Path, metric: str, mode: str) -> None:
        self.directory, self.metric, self.mode = directory, metric, mode
        self.records: dict[int, TrialRecord] = {}
        self.run = RunDirectory(directory)  # its lock is held while trials run

    @property
    def journal(self) -> Path:
        return self.directory / "trials.jsonl"

    @property
    def all(self) -> list[TrialRecord]:
        """Copy of the list of trials. A thread that displays them can iterate over it while trials are added."""
        return list(self.records.values())

    def trial_dir(self, number: int) -> Path:
        """Return the run directory of a trial."""
        return self.directory / "trials" / f"{number:05d}"

    # ------------------------------------------------------------------ journal

    def record_event(self, number: int, event: str, **detail: Any) -> None:
        """Apply an event of a trial and append it to the journal. `event` is "started", "row", "retried" or "ended"."""
        line = {"trial": number, "event": event, "time": time.time(), **detail}
        self.apply(line)
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def apply(self, line: Mapping[str, Any]) -> None:
        """Apply one line of the journal. Ignore a line of a trial whose "started" line was lost."""
        number, event = line["trial"], line["event"]
        if event == "started":
            record = self.records.setdefault(number, TrialRecord(number, dict(line["config"])))
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
        """Read the journal of an earlier process. Trials that did not end are marked as waiting."""
        try:
            memory = Memory(JOURNAL_MEMORY)
            for line in map(memory.take, json_lines(self.journal, JOURNAL)):
                # The last line may be cut off if its writer was killed, and users may have edited the file.
                with contextlib.suppress(ValueError, KeyError):
                    check_kinds(line, _LINE)
                    check_kinds(line.get("row", {}), _ROW)
                    if {"trial", "event", "time"} <= line.keys():
                        self.apply(line)
            with self.journal.open("r+b") as file:
                if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    file.write(b"\n")  # so that the next line begins on a new line
        except FileNotFoundError:
            pass
        except (OSError, LimitError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{str(self.journal)!r} cannot be read ({why}): start a new sweep with another --run-dir"
            ) from None
        for record in self.records.values():
            record.since = None
            if record.status in (*OPEN, "interrupted"):
                record.status = "waiting"

    def recall(self, space: Space) -> None:
        """Replace values that were read from JSON by the equal values of the space."""
        for record in self.all:
            # Rows share their values unless a scheduler has changed them in between.
            configs = {id(each): each for each in (record.config, *record.configs)}
            recalled = {key: _recalled(each, space) for key, each in configs.items()}
            record.config = recalled[id(record.config)]
            record.configs = [recalled[id(config)] for config in record.configs]

    # ------------------------------------------------------------------ results

    def score(self, record: TrialRecord) -> float:
        """Return the best score of a trial. Smaller is better; it is infinity if the trial reported no finite value."""
        return min((score_of(row, self.metric, self.mode) for row in record.rows), default=math.inf)

    def best(self) -> TrialRecord | None:
        """Return the trial with the best value. A failed trial counts only if no other trial has a value."""
        known = [record for record in self.records.values() if self.score(record) < math.inf]
        return min(
            known, key=lambda record: (record.status == "failed", self.score(record), record.number), default=None
        )

    @property
    def trial_hours(self) -> float:
        """Hours of work of all trials together."""
        now = time.time()
        working = sum(now - since for record in self.all if (since := record.since) is not None)
        return (sum(record.seconds for record in self.all) + working) / 3600

    def summary(self) -> dict[str, Any]:
        """Return the content of sweep.json."""
        best = self.best()
        trials = [self._summary_of(self.records[number]) for number in sorted(self.records)]
        return {
            "metric": self.metric, "mode": self.mode, "trial_hours": self.trial_hours, "trials": trials,
            "best": next((trial for trial in trials if best is not None and trial["id"] == best.name), None),
        }  # fmt: skip

    def _summary_of(self, record: TrialRecord) -> dict[str, Any]:
        row = record.best_row(self.metric, self.mode) or (record.rows[-1] if record.rows else {})
        content = {
            "id": record.name, "config": record.best_config(self.metric, self.mode),
            "metrics": {name: _plain(value) for name, value in row.items()}, "status": record.status,
            "epochs": record.epochs, "seconds": record.seconds, "run_dir": str(Path("trials", record.name)),
        }  # fmt: skip
        return content | ({} if record.error is None else {"error": record.error})

    def write(self) -> None:
        """Write sweep.json atomically."""
        replace_text(self.directory / "sweep.json", json.dumps(self.summary(), indent=1, default=str) + "\n")

    def write_best(self, overrides: Overrides) -> Path | None:
        """Write best.yaml: the settings in `overrides`, which all trials share, with the values of the best trial.

        Returns:
            The path of the file, or None if no trial has a value.
        """
        import yaml

        best = self.best()
        if best is None:
            return None
        settings, others, _ = split_sweep(best.best_config(self.metric, self.mode))
        flags = joined(overrides.values(), settings)
        content: dict[str, Any] = {}
        if overrides.script is not None:
            content = {"script": overrides.script, "script_args": [*overrides.script_args, *as_arguments(others)]}
        content |= flags
        if others and overrides.script is None:
            content["hyperparameters"] = others
        content["sources"] = _sources(overrides, settings)
        head = f"# The best of {len(self.records)} trials: {self.metric} {_plain(self._best_value(best))}, trial {best.name}.\n"
        text = yaml.safe_dump(_as_yaml(content), sort_keys=False, default_flow_style=False, allow_unicode=True)
        path = self.directory / "best.yaml"
        replace_text(path, head + text)
        return path

    def _best_value(self, record: TrialRecord) -> Any:
        return (record.best_row(self.metric, self.mode) or {}).get(self.metric)

    def interrupt(self) -> None:
        """Mark trials that did not end as interrupted."""
        for record in self.records.values():
            if record.status in OPEN:
                self.record_event(record.number, "ended", status="interrupted")


def _sources(overrides: Overrides, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the source of each setting, as in the config.yaml of a run. Values of the search space count as flags."""
    sources: dict[str, str] = {}
    for layer, given in (("file", overrides.file), ("flag", joined(overrides.flag, settings))):
        for name, value in given.items():
            sources[name] = layer
            if isinstance(value, Mapping):
                sources.update({f"{name}.{option}": layer for option in value})
    return sources


def as_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values that are not settings as arguments of a script: `--name value`."""
    return tuple(word for name, value in values.items() for word in (f"--{name}", _text(value)))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    """Return `value`, or None if it is NaN or infinite, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_yaml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _as_yaml(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_yaml(inner) for inner in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


# ------------------------------------------------------------------ opening and resuming


def open_sweep(directory: Path, metric: str, mode: str, configuration: Mapping[str, Any], resume: bool) -> Sweep:
    """Open the sweep in `directory` and lock the directory. With `resume`, read the journal of an earlier process.

    Args:
        directory: run directory of the sweep.
        metric: name of the metric that is optimised.
        mode: "min" or "max".
        configuration: settings, search space and flags of the sweep. A resume must have the same one.
        resume: whether to continue a sweep that was cut off.

    Raises:
        ConfigError: the directory holds another sweep, or none to resume.
    """
    import yaml

    file, sweep = directory / "sweep.yaml", Sweep(directory, metric, mode)
    others = {entry.name for entry in directory.iterdir()} - {".lock"} if directory.is_dir() else set()
    if resume and not directory.exists():
        raise ConfigError(
            f"run directory {str(directory)!r} does not exist, but a resume continues an existing sweep: correct run_dir (--run-dir), or"
            " drop resume (--resume) to start a new one"
        )
    if resume and others and not file.exists():
        raise ConfigError(f"run directory {str(directory)!r} holds no sweep to resume: name another with --run-dir")
    sweep.run.check(resume=resume)
    text = yaml.safe_dump(_as_yaml({"metric": metric, "mode": mode, **configuration}), sort_keys=False)
    try:
        now = parse_yaml(text.encode())
    except LimitError as error:
        raise ConfigError(f"search_space: {file} {error}, so that no resume could read it: give fewer values") from None
    if resume and file.exists():
        _check_same(_configuration_before(file), now, directory)
    sweep.run.lock()
    sweep.read()
    (directory / "trials").mkdir(exist_ok=True)
    for record in sweep.records.values():  # so that reports that did not reach the journal are sent again
        last = sweep.trial_dir(record.number).with_name(f"{record.name}.last.json")
        last.unlink(missing_ok=True)
        if record.rows:
            replace_text(last, json.dumps(record.rows[-1]))
    replace_text(file, text)
    return sweep


def _configuration_before(file: Path) -> Mapping[str, Any]:
    try:
        content = parse_yaml(read_bytes(file, MAX_YAML_BYTES))
        check_kinds(content, {"metric": TEXT, "mode": TEXT, "num_samples": COUNT})
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{file} is damaged, so the options of the sweep are unknown ({why}): start a new one with another --run-dir"
        ) from None
    return dict(content)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], directory: Path) -> None:
    """Raise ConfigError if a resumed sweep has another configuration. Its number of trials may only grow."""
    # in the order of the command line, because later settings follow from earlier ones
    for name in {**now, **before}:
        one, other = before.get(name), now.get(name)
        if name == "num_samples":
            if int(one or 0) > int(other or 0):
                raise ConfigError(
                    f"num_samples={other} is less than the {one} of the sweep in {directory}: set {one} or more"
                )
        elif one != other:
            raise ConfigError(
                f"{name}={_short(other)} is not the {_short(one)} of the sweep in {directory}: set it to that, or start a new sweep"
                " with another --run-dir"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def scores(sweep: Sweep) -> Sequence[tuple[TrialRecord, float | None]]:
    """Return every trial in order of its number, with its score, or with None if it has not ended."""
    records = [sweep.records[number] for number in sorted(sweep.records)]
    return [(record, None if record.status in OPEN else sweep.score(record)) for record in records]
