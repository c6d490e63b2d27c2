"""What a run logs to MLflow, on disk: the entries in RUN/mlflow.jsonl, and in RUN/mlflow.json what was sent of them, and where.

The logger appends entries and the sender reads them. What was sent once is never sent to the same run in another form:
a second sending after a crash has the same time, step and value, which MLflow's stores keep once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import replace_text
from distributed.loggers._mlflow.tracking_uri import (
    default_uri,
    has_open_run,
    lasting,
    shown,
    sweep_of,
    users_run,
    users_uri,
)

SPOOL, RECORD = "mlflow.jsonl", "mlflow.json"


@dataclasses.dataclass
class RunRecord:
    """The content of RUN/mlflow.json."""

    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))  # of this run directory
    tracking_uri: str | None = None  # without a password; None: the file beside the run directories
    experiment: str = ""
    experiment_id: str | None = None
    name: str = ""
    run_id: str | None = None
    wanted: str | None = None  # the run that the user had open
    is_joined: bool = False  # the run belongs to somebody else, who ends it
    is_asked_for: bool = False  # a run was asked for, and the answer may not have come
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    sent: int = 0  # bytes of the spool

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord | None:
        """Return the record of a run directory, or None if there is none, or one of another kind."""
        try:
            content = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
            known = {field.name for field in dataclasses.fields(cls)}
            return cls(**{name: value for name, value in content.items() if name in known})
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    @classmethod
    def of_sweep(cls, run_dir: Path) -> RunRecord | None:
        """Return the record of the sweep of which the run is a trial, or None.

        It is None also if the sweep is not logged.
        """
        sweep = sweep_of(run_dir)
        return None if sweep is None else cls.read(sweep)

    @classmethod
    def chosen(cls, run_dir: Path, experiment: str | None, otherwise: str) -> tuple[RunRecord, str]:
        """Return (the record of the run at `run_dir`, its tracking URI).

        The record is new if there is none, and if the user has another run open or names another store. `otherwise`
        names the experiment if nobody else does.
        """
        sweep, of_user, default = cls.of_sweep(run_dir), users_run(), default_uri(run_dir)
        if sweep is not None and not has_open_run():  # a run that is open around the search belongs to the sweep
            of_user = None
        record = cls.read(run_dir)
        uri = (of_user and of_user[1]) or users_uri() or (record and record.tracking_uri)
        uri = uri or (sweep and sweep.tracking_uri) or default
        if of_user is not None and record is not None and of_user[0] not in (record.wanted, record.run_id):
            record = None
        record = record or cls(name=run_dir.name, wanted=of_user[0] if of_user else None)
        record.tracking_uri = None if uri == default else lasting(shown(uri))
        if record.experiment_id is None and sweep is not None:
            record.experiment, record.experiment_id = sweep.experiment, sweep.experiment_id
        elif record.experiment_id is None:
            record.experiment, record.experiment_id = _experiment(experiment, otherwise)
        return record, uri

    def write(self, run_dir: Path) -> None:
        """Replace the file."""
        replace_text(run_dir / RECORD, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def _experiment(asked: str | None, otherwise: str) -> tuple[str, str | None]:
    """Return (name, id) of the experiment that was asked for, also by MLflow's own variables."""
    name = asked or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    by_id = None if name else os.environ.get("MLFLOW_EXPERIMENT_ID")
    return name or ("" if by_id else otherwise), by_id


class Spool:
    """RUN/mlflow.jsonl: one entry to log per line, oldest first, only appended to."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / SPOOL
        self._fd: int | None = None

    def open(self) -> list[dict[str, Any]]:
        """Take out half a line that a killed writer left; returns what is in it. OSError where it cannot be written."""
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        read = list(self.read(0))
        os.ftruncate(self._fd, read[-1][1] if read else 0)
        return [entry for entry, _ in read]

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append one line as a whole, or nothing. Raises OSError if the disk is full."""
        assert self._fd is not None
        line = (json.dumps(entry) + "\n").encode()
        before = os.lseek(self._fd, 0, os.SEEK_END)
        try:
            if os.write(self._fd, line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise

    def read(self, start: int, limit: int = 1 << 62) -> Iterator[tuple[dict[str, Any], int]]:
        """Return at most `limit` whole lines from byte `start` on, each with the byte at which it ends."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(start)
            for _ in range(limit):
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                with contextlib.suppress(ValueError):
                    yield json.loads(line), start

    @property
    def size(self) -> int:
        """The number of bytes written."""
        return self.path.stat().st_size if self.path.exists() else 0

    def close(self) -> None:
        """Close the file: nothing more is written."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def last_steps(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Return the last step of each metric that was logged."""
    steps: dict[str, int] = {}
    for entry in entries:
        if entry["kind"] == "metrics":
            for name in entry["values"]:
                steps[name] = max(steps.get(name, -1), entry["step"])
    return steps


def logged_params(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return the parameters that were logged, each with its latest value."""
    params: dict[str, str] = {}
    for entry in entries:
        if entry["kind"] == "params":
            params.update({name.partition(".from_step_")[0]: value for name, value in entry["values"].items()})
    return params
