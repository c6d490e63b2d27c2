"""Log a fit to MLflow: parameters, metrics, times, system metrics, and at the end artifacts and a registered model.

Everything is first written into the run directory (`_mlflow.spool`). A thread sends it from there (`_mlflow.sender`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.callbacks import Callback
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.manifest import step_name
from distributed.config.fields import rules
from distributed.config.settings import GROUPS, OPTIMIZATION, TRAINING, VALIDATION, DistributedConfig
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError
from distributed.loggers._mlflow import tracking_uri
from distributed.loggers._mlflow.run import metric_name
from distributed.loggers._mlflow.sender import Sender
from distributed.loggers._mlflow.spool import RunRecord, logged_params, spool_of
from distributed.loggers._mlflow.system import SystemSampler
from distributed.loggers.base import LoggedFit, Tracker, ValueTracker
from distributed.loggers.spool import Spool, last_steps
from distributed.runs.directory import RunDirectory, script_name
from distributed.runs.summary import was_interrupted
from distributed.state import LoggedMedia, TrainState

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # seconds that the start of a run waits for a server to return the id of the run
_OPEN_S = 60.0  # seconds that it waits instead if the store is a local database, which may have to be created
# Seconds that the end of a run waits for each answer, and for all answers, if it was stopped or failed.
INTERRUPTED_S, INTERRUPTED_LIMIT_S = 5.0, 10.0
_SYNC_S = 300.0  # seconds for each answer in `send_rest`, whose caller waits for nothing else
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class MlflowLogger(ValueTracker):
    """Log to MLflow from the main process.

    Call `open()` before the first step, and `close()` when the fit has written its result.
    """

    def __init__(self, fit: LoggedFit) -> None:
        self._fit = fit
        self._dir = fit.run.path.absolute()
        self._spool = spool_of(self._dir)
        self._logged: dict[str, int] = {}  # metric -> the last step that was logged, in this or an earlier attempt
        self._is_losing = False
        self._status = "FAILED"
        self._checkpoint: Path | None = None

    def open(self) -> dict[str, str]:
        """Start to log. Return the environment variables by which the user's code on every rank joins the run.

        Return none if MLflow has not returned the id of the run in time.
        """
        if self._fit.merged.config.mlflow_register_model is not None:
            self._fit.backend.observer.keep_example()
        entries = self._spool.open()
        self._logged = last_steps(entries)
        record, uri = self._choose()
        import_quietly()
        self._sender = Sender(self._dir, record, self._spool, uri, self._warn)
        self._before = retry_once()
        self._log_start(logged_params(entries), record.tags)
        self._sender.start()
        self._sampler = SystemSampler(self._system)
        self._sampler.start()
        if not self._sender.is_open.wait(patience(self._dir, uri)):
            self._sender.warn_once("has not answered yet")
        if self._sender.run_id is None:
            return {}
        return {tracking_uri.RUN_ID: self._sender.run_id, tracking_uri.URI: uri}

    # callbacks

    def record_media(self, state: TrainState, media: LoggedMedia) -> None:
        self._put({"kind": "artifact", "path": media.path, "to": "media"})

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        ranks = [value for name, value in seconds.items() if name.startswith("rank_")]
        values = {name: value for name, value in seconds.items() if not name.startswith("rank_")}
        spread = {"slowest_rank_s": max(ranks), "fastest_rank_s": min(ranks)} if ranks else {}
        self._metrics(state.step, {f"time/{name}": value for name, value in (values | spread).items()})

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        self._checkpoint = path

    def on_train_end(self, state: TrainState) -> None:
        self._status = "KILLED" if was_interrupted(state) else "FINISHED"

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self._status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"

    def close(self) -> None:
        """Log how the run ended and send what is left, as long as MLflow answers.

        Called after `result.json` was written.
        """
        self._sampler.finish()
        self._log_end()
        limits = () if self._status == "FINISHED" else (INTERRUPTED_S, INTERRUPTED_LIMIT_S)
        is_done = self._sender.finish(*limits)
        self._spool.close()
        retry_as_before(self._before)
        if not is_done:
            self._sender.warn_once("has not accepted all records")
            text = (
                f"MLflow does not have all records: send the rest with 'distributed mlflow-sync {self._fit.run.path}'"
            )
            self._fit.on_event({"kind": "notice", "text": text})

    # what is logged

    def _choose(self) -> tuple[RunRecord, str]:
        """Return the record of the run directory, and the tracking URI."""
        record, uri = RunRecord.chosen(self._dir, self._fit.merged.config.mlflow_experiment, Path(script_name()).stem)
        record.tags = {"distributed.run_dir": self._dir.name, "distributed.settings": self._comparable()}
        record.write(self._dir)
        return record, uri

    def _log_start(self, logged: Mapping[str, str], tags: Mapping[str, str]) -> None:
        now = {name: value for name, value in self._params().items() if logged.get(name) != value}
        step = self._fit.state.step
        if now:  # MLflow cannot change a parameter, so values that a resume changed get new names
            self._put({
                "kind": "params",
                "values": {f"{name}.from_step_{step}" if name in logged else name: value for name, value in now.items()},
            })  # fmt: skip
        self._put({"kind": "tags", "values": tags})
        self._put({"kind": "status", "status": "RUNNING", "time": _now()})
        self._put({"kind": "artifact", "path": "config.yaml", "to": ""})

    def _params(self) -> dict[str, str]:
        fit = self._fit
        config, batch = fit.merged.config, fit.batch
        values: dict[str, Any] = {}
        for name in fit.merged.sources:
            group, _, option = name.partition(".")
            if option:
                values[name] = getattr(config, group)[option]
            elif name not in GROUPS and not name.startswith("mlflow_"):
                values[name] = getattr(config, name)
        values |= {
            **self._resources(), "batch_size": batch.batch_size, "global_batch_size": batch.global_batch_size,
            "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        }  # fmt: skip
        return {metric_name(name): str(value) for name, value in {**fit.merged.hyperparameters, **values}.items()}

    def _resources(self) -> dict[str, Any]:
        """Return the backend, device and number of processes of the run, whether they were set or not.

        A run that the user has open gets no `num_gpus`, because the user may log a value of that name.
        """
        plan, world_size = self._fit.plan, self._fit.context.world_size
        num_gpus = world_size * self._fit.backend.devices_per_process if plan.device == "cuda" else 0
        record = RunRecord.read(self._dir)
        is_users_own = record is not None and record.wanted is not None
        return {
            "backend": plan.backend, "device": plan.device, "num_nodes": plan.num_nodes,
            "nproc_per_node": plan.nproc_per_node, "world_size": world_size,
            **({} if is_users_own else {"num_gpus": num_gpus}),
        }  # fmt: skip

    def _comparable(self) -> str:
        """Return a digest of the script and the settings.

        Runs that differ only in their processes have the same digest.
        """
        config = self._fit.merged.config
        names = [
            n for n, rule in rules(DistributedConfig).items() if rule.section in (TRAINING, VALIDATION, OPTIMIZATION)
        ]
        values = {name: getattr(config, name) for name in (*names, "data")}
        same = [
            Path(sys.argv[0]).name,
            sys.argv[1:],
            self._fit.plan.device,
            values,
            dict(self._fit.merged.hyperparameters),
        ]
        return hashlib.sha256(json.dumps(same, sort_keys=True, default=repr).encode()).hexdigest()[:16]

    def _metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values, except those that an earlier attempt has logged for this step or a later one."""
        new = {}
        for name, value in values.items():
            name = metric_name(name)
            if step > self._logged.get(name, -1):
                new[name], self._logged[name] = float(value), step
        if new:
            self._put({"kind": "metrics", "time": _now(), "step": step, "values": new})

    def _system(self, values: Mapping[str, float]) -> None:
        """Log system metrics. Called in the sampler's thread. Their steps number the measurements, not the updates."""
        last = max((self._logged.get(name, -1) for name in values), default=-1)
        self._metrics(last + 1, values)

    def _log_end(self) -> None:
        state, now = self._fit.state, _now()
        if self._status == "FINISHED":
            best = {f"best_{name}": value for name, value in state.best.items() if name.startswith("val_")}
            throughput = state.samples_seen / state.train_time_s if state.train_time_s else 0.0
            self._metrics(state.step, best | {"throughput": throughput, "total_time": state.total_time})
            if self._fit.context.world_size > 1 and throughput:
                self._put({
                    "kind": "scaling", "throughput": throughput, "world_size": self._fit.context.world_size,
                    "settings": self._comparable(), "step": state.step, "time": now,
                })  # fmt: skip
        self._put({"kind": "status", "status": self._status, "time": now})
        for name in ("config.yaml", "result.json", "report.html"):
            if (self._dir / name).exists():
                self._put({"kind": "artifact", "path": name, "to": ""})
        if self._status == "FINISHED" and self._checkpoint is not None:
            self._log_checkpoint(self._checkpoint)

    def _log_checkpoint(self, checkpoint: Path) -> None:
        config, path = self._fit.merged.config, os.path.relpath(checkpoint.absolute(), self._dir)
        if config.mlflow_checkpoint:
            self._put({"kind": "artifact", "path": path, "to": f"checkpoints/{checkpoint.name}"})
        if config.mlflow_register_model is not None:
            model = type(self._fit.backend.model)
            name = f"{model.__module__}.{model.__qualname__}"
            entry = {"kind": "model", "name": config.mlflow_register_model, "checkpoint": path, "model_class": name}
            self._put({**entry, **self._program(checkpoint)})

    def _program(self, checkpoint: Path) -> dict[str, str]:
        """Write the model as a program that MLflow can run, if the engine can. Return where it is and which module loads it."""
        path = Path("export", "registered.pt2")
        try:
            if checkpoint.name != step_name(self._fit.state.step):
                raise TrainingError(f"{checkpoint.name} is not of the last update")
            (self._dir / path).parent.mkdir(exist_ok=True)
            return {"program": str(path), "loader": self._fit.backend.observer.write_program(self._dir / path)}
        except DistributedError as error:
            text = f"the registered model holds weights only, which mlflow.pyfunc does not run: {error}"
            self._fit.on_event({"kind": "notice", "text": text})
            return {}

    def _put(self, entry: Mapping[str, Any]) -> None:
        try:
            self._spool.append(entry)
        except OSError as error:  # with a full disk, lines are lost, but the run goes on
            if not self._is_losing:
                logger.warning(
                    "%s cannot be written (%s): lines are lost until it can be written",
                    self._spool.path,
                    error.strerror,
                )
            self._is_losing = True

    def _warn(self, text: str) -> None:
        self._fit.on_event({"kind": "warning", "text": text})


def make(fit: LoggedFit) -> list[Callback]:
    """Return the loggers of this rank: a `JoinedRun`, and on the main process also an `MlflowLogger`. All ranks must call this."""
    loggers: list[Callback] = []

    def open_on_main() -> dict[str, str]:
        loggers.append(main := MlflowLogger(fit))
        return main.open()

    environ = Agreement(fit.backend.world, fit.merged.config.timeout_s).on_main(open_on_main)
    return [*loggers, JoinedRun(environ, is_worker=fit.is_worker)]


def end_without_workers(run: RunDirectory, code: int) -> None:
    """Tell MLflow that a run ended with the exit code `code`. Launcher only."""
    with contextlib.suppress(OSError, DistributedError):  # only the error of the run itself is shown
        end_run(run, "KILLED" if code in (130, 143) else "FAILED")


def end_run(run: RunDirectory, status: str, is_sent: bool = True) -> bool:
    """Log the end of a run that has no worker left to do so. Launcher only.

    Return whether MLflow took everything. `mlflow-sync` can send the rest later.
    """
    record = RunRecord.read(run.path)
    entries = [entry for entry, _ in spool_of(run.path).read(0)]
    ends = [entry["status"] for entry in entries if entry["kind"] == "status"]
    if record is None or not ends:
        return True
    spool = spool_of(run.path)
    spool.open()
    if ends[-1] == "RUNNING":
        spool.append({"kind": "status", "status": status, "time": _now()})
    is_done = record.sent >= spool.size
    if is_sent and not is_done:  # the run may have been killed before it had sent everything
        sender = _sender(run.path, record, spool, lambda text: None)
        sender.start()
        is_done = sender.finish(INTERRUPTED_S, INTERRUPTED_LIMIT_S)
    spool.close()
    return is_done


def send_rest(run_dir: Path, warn: Callable[[str], None]) -> str:
    """Send what the run at `run_dir` has not sent yet. Return the tracking URI. `warn` is called for what MLflow refuses.

    Raises ConfigError if nothing was logged to MLflow, ResourceError if not everything could be sent.
    """
    record = RunRecord.read(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir} holds no mlflow.json: it is not a run that was logged to MLflow")
    spool = spool_of(run_dir)
    try:
        spool.open()
    except OSError as error:
        raise ConfigError(f"{spool.path} cannot be written ({error.strerror}): run the command as its owner") from None
    try:
        sender = _sender(run_dir, record, spool, warn)
        return _all_sent(sender, run_dir)
    finally:
        spool.close()


def _all_sent(sender: Sender, run_dir: Path) -> str:
    uri = tracking_uri.shown(sender.uri)
    if sender.left:
        sender.start()
        if not sender.finish(_SYNC_S):
            raise ResourceError(
                f"MLflow at {uri} does not accept the records of {run_dir} ({sender.cause or 'no answer'}; {sender.left} bytes"
                " are left): try again later"
            )
    return uri


def _sender(run_dir: Path, record: RunRecord, spool: Spool, warn: Callable[[str], None]) -> Sender:
    """Return a sender for use after training."""
    os.environ.setdefault(_RETRIES, "1")
    uri = tracking_uri.users_uri() or record.tracking_uri or tracking_uri.default_uri(run_dir)
    tracking_uri.check_uri(uri)
    import_quietly()
    return Sender(run_dir.absolute(), record, spool, uri, warn, is_training=False)


def recorded_environ(run_dir: Path) -> dict[str, str]:
    """Return the variables by which the workers of a further attempt continue the user's own run.

    `mlflow.start_run()` in the script then joins the run that the script had open in the first attempt. Return none if the run
    was created by this package and not by the script.
    """
    record = RunRecord.read(run_dir)
    if record is None or record.wanted is None:
        return {}
    uri = tracking_uri.users_uri() or record.tracking_uri or tracking_uri.default_uri(run_dir)
    tracking_uri.given_out.add(record.wanted)
    return {tracking_uri.RUN_ID: record.wanted, tracking_uri.URI: uri}


class JoinedRun(Tracker):
    """Set MLFLOW_RUN_ID and MLFLOW_TRACKING_URI in the process of a rank, for the user's code.

    A worker keeps the variables. Any other process keeps them only until the end of the fit, because its next
    `mlflow.start_run()` is to create a new run.
    """

    def __init__(self, values: Mapping[str, str], *, is_worker: bool) -> None:
        # Workaround (MLflow 3.17.2, mlflow/mlflow#15713; may go when a nested run ignores MLFLOW_RUN_ID): if the user has a
        # run open, `start_run(nested=True)` would return the trainer's run and not a new one.
        if tracking_uri.has_open_run():
            values = {}
        tracking_uri.given_out.update(value for name, value in values.items() if name == tracking_uri.RUN_ID)
        self._before = {name: os.environ.get(name) for name in values}
        self._values, self._is_worker = dict(values), is_worker
        os.environ.update(values)

    def close(self) -> None:
        if self._is_worker:
            return
        for name, value in self._before.items():
            if value is not None:
                os.environ[name] = value
            elif os.environ.get(name) == self._values[name]:
                del os.environ[name]


def _now() -> int:
    return int(time.time() * 1000)


def patience(run_dir: Path, uri: str) -> float:
    """Return the seconds that the start of a run waits for its id from MLflow.

    Return 0 for a trial if the server has not returned the id of the sweep's run either.
    """
    sweep = RunRecord.of_sweep(run_dir)
    if not tracking_uri.is_remote(uri):
        return _OPEN_S
    return _ANSWER_S if sweep is None or sweep.run_id is not None else 0.0


def retry_once() -> str | None:
    """Set the number of retries to 1, unless the user has set it. Return the argument for `retry_as_before`.

    Workaround (MLflow 3.17.2, mlflow/mlflow#14247; may go when a call can limit its retries): with the default of seven retries, a
    call blocks for four minutes if the server does not answer.
    """
    before = os.environ.get(_RETRIES)
    os.environ.setdefault(_RETRIES, "1")
    return before


def retry_as_before(before: str | None) -> None:
    """Undo `retry_once`."""
    if before is None:
        os.environ.pop(_RETRIES, None)


def import_quietly() -> None:
    """Import MLflow without its telemetry. Raises ResourceError if MLflow does not load.

    Workaround (MLflow 3.17.2, no upstream issue known; may go when MLflow sends no telemetry by default): it reads the variable
    during its import.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        importlib.import_module("mlflow")
    except Exception as error:  # a broken library raises errors of any kind
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise ResourceError(
            f"mlflow_tracking=True needs mlflow, which is installed but does not load ({reason}): run {tracking_uri.REINSTALL}"
        ) from error
