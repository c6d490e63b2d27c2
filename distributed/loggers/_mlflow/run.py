"""One run at MLflow: find, join or create it, and log to it.

Every method may block until the server answers.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.loggers._mlflow.database import make_whole
from distributed.loggers._mlflow.spool import RunRecord
from distributed.loggers._mlflow.tracking_uri import beside, default_uri

KEY = "distributed.key"  # the tag with the key of the run directory to which the run belongs
_SETTINGS, _BASELINE = "distributed.settings", "distributed.scaling_baseline"
PARENT = "mlflow.parentRunId"

Entry = Mapping[str, Any]


class Refused(Exception):
    """MLflow refuses a request. Sending the same request again would fail in the same way."""


class Kept(Refused):
    """Some parameters already have other values in the run, which MLflow does not change. All others were logged."""


class Later(Exception):
    """The run of a trial cannot be created yet, because its parent, the run of the sweep, does not exist yet."""


class TrackedRun:
    """The MLflow run of one run directory. Its methods update `record`, and the caller writes the record to its file."""

    def __init__(self, run_dir: Path, record: RunRecord, uri: str, on_request: Callable[[int], None]) -> None:
        """Create the client. `on_request` is called before each request with the number of bytes of the files in the request."""
        from mlflow import MlflowClient

        self._on_request = on_request
        self._run_dir, self._record, self.uri = run_dir, record, uri
        with _without_migration_lines():
            make_whole(uri)
            self._client = MlflowClient(tracking_uri=uri)
        self.id = ""

    # finding the run

    def open(self) -> bool:
        """Find the recorded run, join the run that the user has open, or create a run. Return whether it is not the recorded one."""
        record = self._record
        with _without_migration_lines():
            found = self._usable(record.run_id) or self._joined() or self._own()
        is_other: bool = found.info.run_id != record.run_id
        record.run_id, record.experiment_id = found.info.run_id, found.info.experiment_id
        self.id = found.info.run_id
        self._ask(self._client.set_tag, self.id, KEY, record.key)
        return is_other

    def _joined(self) -> Any:
        """Return the run that the user has open, or None.

        If another trainer already writes to it, return a new run below it, because the steps of the two trainers would be mixed.
        """
        run = self._usable(self._record.wanted)
        if run is not None and run.data.tags.get(KEY, self._record.key) != self._record.key:
            return self._make(run.info.experiment_id, {PARENT: run.info.run_id})
        self._record.is_joined = run is not None
        return run

    def _own(self) -> Any:
        """Return the run of this run directory, in the recorded experiment. The run of a trial is below that of its sweep."""
        sweep = RunRecord.of_sweep(self._run_dir)
        if sweep is not None and sweep.run_id is None:
            raise Later("the run of the sweep is not there yet")
        experiment = self._experiment() if sweep is None else str(sweep.experiment_id)
        found = self._earlier(experiment) if self._record.is_asked_for else None
        return found or self._make(experiment, {} if sweep is None else {PARENT: str(sweep.run_id)})

    def _usable(self, run_id: str | None) -> Any:
        """Return the run with the id `run_id` if it exists and is not deleted, else None."""
        if run_id is None:
            return None
        try:
            run = self._ask(self._client.get_run, run_id)
        except Refused:
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def is_there(self) -> bool:
        """Return whether the run still exists."""
        return self._usable(self.id) is not None

    def _earlier(self, experiment: str) -> Any:
        """Return a run that the server created for this run directory without its answer arriving, or None."""
        ours = f"tags.`{KEY}` = '{self._record.key}'"
        return next(iter(self._ask(self._client.search_runs, [experiment], ours, max_results=1)), None)

    def _make(self, experiment_id: str, tags: Mapping[str, str]) -> Any:
        from mlflow.tracking.context.registry import resolve_tags

        record = self._record
        record.is_joined, record.is_asked_for = False, True
        record.write(self._run_dir)
        all_tags = resolve_tags({**record.tags, **tags, KEY: record.key})
        return self._ask(self._client.create_run, experiment_id, tags=all_tags, run_name=record.name)

    def _experiment(self) -> str:
        """Return the id of the recorded experiment. Create it if it does not exist."""
        name = self._record.experiment
        if not name:
            return str(self._record.experiment_id)
        found = self._ask(self._client.get_experiment_by_name, name)
        if found is None:
            # Workaround (MLflow 3.17.2, mlflow/mlflow#4034; may go when MLflow stores artifacts beside a local database): with a
            # local database, MLflow would store them in the working directory. A server chooses the location itself.
            is_ours = self.uri == default_uri(self._run_dir)
            location = (beside(self._run_dir) / "mlartifacts").as_uri() if is_ours else None
            with contextlib.suppress(Refused):  # another run has just created it
                return str(self._ask(self._client.create_experiment, name, artifact_location=location))
            found = self._ask(self._client.get_experiment_by_name, name)
        return str(found.experiment_id)

    # logging to the run

    def log(self, entries: Sequence[Entry]) -> None:
        """Log entries of one kind, as `grouped` returns them. Raises Refused, or any other error if the server is absent."""
        kind = entries[0]["kind"]
        if kind == "metrics":
            self._metrics(entries)
            return
        (entry,) = entries
        {
            "params": self._params, "tags": self._tags, "status": self._status, "artifact": self._artifact,
            "model": self._model, "scaling": self._scaling,
        }[kind](entry)  # fmt: skip

    def _metrics(self, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric

        entities = [
            Metric(name, value, entry["time"], entry["step"])
            for entry in entries
            for name, value in entry["values"].items()
        ]
        self._ask(self._client.log_batch, self.id, metrics=entities)

    def _params(self, entry: Entry) -> None:
        """Log the parameters that the run does not have yet. Raises Kept for changed values, because MLflow cannot change them."""
        from mlflow.entities import Param

        there = self._ask(self._client.get_run, self.id).data.params
        new = {name: value for name, value in entry["values"].items() if name not in there}
        entities = list(new.items())
        for start in range(0, len(entities), 100):
            self._ask(self._client.log_batch, self.id, params=[Param(*each) for each in entities[start : start + 100]])
        other = sorted(name for name, value in entry["values"].items() if there.get(name, value) != value)
        if other:
            raise Kept(
                f"the run has {', '.join(f'{name}={there[name]}' for name in other)}, which MLflow does not change"
            )

    def _tags(self, entry: Entry) -> None:
        from mlflow.entities import RunTag

        self._ask(self._client.log_batch, self.id, tags=[RunTag(*each) for each in entry["values"].items()])

    def _status(self, entry: Entry) -> None:
        if self._record.is_joined:
            return
        if entry["status"] == "RUNNING":
            self._ask(self._client.update_run, self.id, status="RUNNING")
        else:
            self._ask(self._client.set_terminated, self.id, status=entry["status"], end_time=entry["time"])

    def _artifact(self, entry: Entry) -> None:
        path = self._run_dir / entry["path"]
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        if path.exists():  # an older checkpoint may be gone by now
            self._ask(log, self.id, str(path), entry["to"] or None, num_bytes=_num_bytes(path))

    def _model(self, entry: Entry) -> None:
        """Log the model of a checkpoint and create a version of the registered model, unless the version exists."""
        from distributed.loggers._mlflow.model import staged_model

        name, checkpoint = entry["name"], self._run_dir / entry["checkpoint"]
        to = f"model/{checkpoint.name}"
        if not checkpoint.exists():
            return
        size = _num_bytes(checkpoint)
        self._on_request(size)  # the checkpoint is copied before the first request
        program = self._run_dir / entry["program"] if "program" in entry else None
        with staged_model(checkpoint, entry["model_class"], self.id, program, entry.get("loader", "")) as directory:
            self._ask(self._client.log_artifacts, self.id, str(directory), to, num_bytes=size)
        with contextlib.suppress(Refused):  # the registered model exists already
            self._ask(self._client.create_registered_model, name)
        source = f"{self._ask(self._client.get_run, self.id).info.artifact_uri}/{to}"
        versions = self._ask(self._client.search_model_versions, f"name='{name}' and run_id='{self.id}'")
        if all(version.source != source for version in versions):
            self._ask(self._client.create_model_version, name, source, self.id)

    def _scaling(self, entry: Entry) -> None:
        """Log the speed-up over the newest single-process run with the same settings, if there is one."""
        from mlflow.entities import Metric, RunTag

        same = (
            f"tags.`{_SETTINGS}` = '{entry['settings']}' and params.world_size = '1' and attributes.status = 'FINISHED'"
        )
        alone = self._ask(
            self._client.search_runs,
            [str(self._record.experiment_id)],
            same,
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        before = alone[0].data.metrics.get("throughput") if alone else None
        if not before:
            return
        speedup = entry["throughput"] / before
        values = {"speedup": speedup, "scaling_efficiency": speedup / entry["world_size"]}
        metrics = [Metric(name, value, entry["time"], entry["step"]) for name, value in values.items()]
        self._ask(
            self._client.log_batch, self.id, metrics=metrics, tags=[RunTag(_BASELINE, alone[0].info.run_id)]
        )  # fmt: skip

    def _ask(self, call: Any, *arguments: Any, num_bytes: int = 0, **named: Any) -> Any:
        """Call `call` and return its result. Raises Refused if MLflow refuses the request itself."""
        from mlflow.exceptions import MlflowException

        self._on_request(num_bytes)
        try:
            return call(*arguments, **named)
        except MlflowException as error:
            if error.error_code in _NEVER:
                raise Refused(" ".join(str(error).split())) from error
            raise


def grouped(entries: Sequence[tuple[Entry, int]]) -> Iterator[tuple[list[Entry], int]]:
    """Yield (entries that go into one request, the byte of the spool at which the last one ends).

    A request has at most 1000 metrics, which is MLflow's limit.
    """
    batch: list[Entry] = []
    count = end = 0
    for entry, stop in entries:
        size = len(entry["values"]) if entry["kind"] == "metrics" else 1000
        if batch and count + size > 1000:
            yield batch, end
            batch, count = [], 0
        batch.append(entry)
        count, end = count + size, stop
    if batch:
        yield batch, end


def metric_name(name: str) -> str:
    """Return `name` with only those characters that MLflow allows, and in the form of a valid path."""
    return posixpath.normpath(re.sub(r"[^\w.\-/ ]", "_", name)[:250]).lstrip("/.") or "_"


_NEVER = frozenset(
    {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"}
)


def _num_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(each.stat().st_size for each in files if each.is_file())


@contextlib.contextmanager
def _without_migration_lines() -> Iterator[None]:
    """Silence the log of migrations.

    Workaround (MLflow 3.17.2, no upstream issue known; may go when MLflow creates a new database without migrations): MLflow logs a
    line about each of a hundred migrations.
    """
    loggers = [logging.getLogger(name) for name in ("mlflow.store.db.utils", "alembic", "alembic.runtime.migration")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
