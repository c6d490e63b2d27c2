"""Records of a run for MLflow, on disk: the entries in RUN/mlflow.jsonl; in RUN/mlflow.json, how many were sent, and to which run.

The logger appends entries and the sender reads them. An entry never changes. If it is sent again after a crash, it has the same
time, step and value, and MLflow's stores keep it only once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import replace_text
from distributed.config.kinds import COUNT, FLAG, TEXT, check_kinds, object_of, optional
from distributed.config.reading import MAX_RECORD_BYTES, parse_json, read_bytes
from distributed.loggers._mlflow.tracking_uri import (
    default_uri,
    has_open_run,
    lasting,
    shown,
    sweep_of,
    users_run,
    users_uri,
)
from distributed.loggers.spool import Spool

SPOOL, RECORD = "mlflow.jsonl", "mlflow.json"
# Of the values of a record.
_KINDS = {
    "key": TEXT, "tracking_uri": optional(TEXT), "experiment": TEXT, "experiment_id": optional(TEXT), "name": TEXT,
    "run_id": optional(TEXT), "wanted": optional(TEXT), "is_joined": FLAG, "is_asked_for": FLAG, "tags": object_of(TEXT), "sent": COUNT,
}  # fmt: skip


@dataclasses.dataclass
class RunRecord:
    """The content of RUN/mlflow.json."""

    # Identifies this run directory in MLflow.
    key: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    tracking_uri: str | None = None  # without a password; None for the SQLite file beside the run directories
    experiment: str = ""
    experiment_id: str | None = None
    name: str = ""
    run_id: str | None = None
    wanted: str | None = None  # the run that the user had open
    is_joined: bool = False  # whether the run is the user's, who ends it
    is_asked_for: bool = False  # whether MLflow was asked for a new run; its answer may not have arrived
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    sent: int = 0  # number of bytes of the spool that were sent

    @classmethod
    def read(cls, run_dir: Path) -> RunRecord | None:
        """Return the record of a run directory, or None if it is missing or cannot be read."""
        try:
            content = parse_json(read_bytes(run_dir / RECORD, MAX_RECORD_BYTES))
            check_kinds(content, _KINDS)
            return cls(**{name: value for name, value in content.items() if name in _KINDS})
        except (OSError, ValueError):
            return None

    @classmethod
    def of_sweep(cls, run_dir: Path) -> RunRecord | None:
        """Return the record of the sweep of which the run is a trial.

        Return None if the run is not a trial, or if the sweep is not logged.
        """
        sweep = sweep_of(run_dir)
        return None if sweep is None else cls.read(sweep)

    @classmethod
    def chosen(cls, run_dir: Path, experiment: str | None, otherwise: str) -> tuple[RunRecord, str]:
        """Return (the record of the run at `run_dir`, its tracking URI).

        The record is new if there is none yet, or if the user has another run open. `otherwise` is the name of the experiment if
        neither `experiment`, nor the sweep, nor MLflow's variables name one.
        """
        sweep, of_user, default = cls.of_sweep(run_dir), users_run(), default_uri(run_dir)
        if sweep is not None and not has_open_run():  # MLFLOW_RUN_ID then belongs to the sweep, not to its trial
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
        """Write the record into RUN/mlflow.json, atomically."""
        replace_text(run_dir / RECORD, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def _experiment(given: str | None, otherwise: str) -> tuple[str, str | None]:
    """Return (name, id) of the experiment: `given`, or the one in MLflow's environment variables, or else `otherwise`."""
    name = given or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    by_id = None if name else os.environ.get("MLFLOW_EXPERIMENT_ID")
    return name or ("" if by_id else otherwise), by_id


def spool_of(run_dir: Path) -> Spool:
    """Return the spool of the run directory, which is not open yet."""
    return Spool(run_dir / SPOOL)


def logged_params(entries: list[dict[str, Any]]) -> dict[str, str]:
    """Return the parameters that were logged, each with its latest value."""
    params: dict[str, str] = {}
    for entry in entries:
        if entry["kind"] == "params":
            params.update({name.partition(".from_step_")[0]: value for name, value in entry["values"].items()})
    return params
