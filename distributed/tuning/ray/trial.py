"""A trial of a sweep, inside the actor that Ray Tune created for it: run the job, and report a score for each epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.trials import wait_for_thread
from distributed.checkpoints.durable import replace_text
from distributed.errors import ConfigError, TrainingError
from distributed.metrics.monitor import unknown_metric
from distributed.runs.summary import one_line
from distributed.runs.temporary import temporary_directory
from distributed.training.trial import Trial
from distributed.tuning.jobs import UnknownMetric
from distributed.tuning.plan import SweepPlan, total
from distributed.tuning.results import checkpoint_of, rows_of
from distributed.tuning.sweep import progress_of, score_of

_THREAD_S = "600"  # seconds for a stopped trial to save and leave before its actor runs another trial
_COPY_S = 30.0  # time for the trial whose state is taken over to write its first checkpoint
_SOURCE = "source.json"


class Stopped(SystemExit):
    """Raised by a report if Ray Tune stops or pauses the trial."""


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """What an actor needs besides the values of a trial."""

    plan: SweepPlan
    cwd: str
    is_shared: bool  # whether the scheduler pauses trials, or lets one take over the state of another


def run(context: ActorContext, config: Mapping[str, Any]) -> None:
    """Run one trial until it ends. Write an exception to a file before raising it.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray Tune passes on the exception itself): Ray Tune keeps only
    the text of the exception, mixed with text of its own.
    """
    number, plan = int(config["trial"]), context.plan
    directory = plan.directory / "trials" / f"{number:05d}"
    error_file = directory.with_name(f"{directory.name}.error.json")
    error_file.unlink(missing_ok=True)
    _prepare(context)
    try:
        is_again = directory.exists() and any(directory.iterdir())
        reporter = TuneReporter(
            context, number, _take_over(plan, number), directory.with_name(f"{directory.name}.last.json")
        )
        if is_again:
            reporter.catch_up(directory)
        trial = Trial(directory, is_again, reporter.epoch)
        reporter.finish(plan.job.run(trial, config["values"], total(plan.bundles).get("CPU", 1.0)))
    except BaseException as error:  # the top frame of a trial: the table must show every error
        if isinstance(error, Stopped) or (isinstance(error, SystemExit) and plan.stop_file.exists()):
            raise
        text = "".join(traceback.format_exception(error))
        fatal = isinstance(error, UnknownMetric)
        error_file.write_text(json.dumps({"error": one_line(error), "is_fatal": fatal}))
        with open(f"{directory}.log", "a", encoding="utf-8") as log:
            log.write(text)
        if isinstance(error, Exception):
            raise
        # Workaround (Ray 2.60, no upstream issue known; may go when a trial fails by SystemExit as by other errors): Ray takes it for
        # the end of the process.
        raise TrainingError(one_line(error)) from error


def _prepare(context: ActorContext) -> None:
    """Make Ray Tune wait for the thread of a trial, and change to the working directory of the sweep."""
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = _THREAD_S
    wait_for_thread()
    with contextlib.suppress(OSError):  # the directory does not exist on this node
        os.chdir(context.cwd)


class TuneReporter:
    """Report a trial to Ray Tune: the score (smaller is better), the progress in epochs or validations, and the row for
    our tables."""

    def __init__(self, context: ActorContext, number: int, cloned: int | None, file: Path) -> None:
        self._context, self._plan, self._number, self._cloned, self._file = context, context.plan, number, cloned, file
        self._rows = 0
        # A trial that was paused or cut off after its last epoch has nothing more to report.
        self._last: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self._names: dict[str, Any] = {}  # every metric that was reported

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Report a row: a finished epoch, or a validation. Raises Stopped if Ray Tune stops or pauses the trial."""
        row = _plain(row)
        self._names |= row
        self._rows += 1
        if self._plan.metric in row:
            self._last = row
            self._send(row)
        elif self._plan.job.needs_rows:
            raise self._unknown()

    def catch_up(self, directory: Path) -> None:
        """Report rows of training that were never reported, because the processes of a script do not wait for Ray Tune."""
        if self._cloned is None:
            for row in rows_of(directory):
                if row["step"] > self._last.get("step", 0):
                    self.epoch(row)

    def finish(self, returned: Any) -> None:
        """Report the end of a trial that was not stopped.

        Args:
            returned: what its function returned: metrics, a number, or None.
        """
        metrics = {self._plan.metric: returned} if _is_number(returned) else returned
        if metrics is not None and not isinstance(metrics, Mapping):
            raise ConfigError(
                f"train_fn returned a {type(metrics).__name__}: return a dict of metrics, a number, or nothing if a Trainer reports"
            )
        last = {**self._last, **_plain(metrics or {})}
        self._names |= last
        if self._plan.metric not in last:
            raise self._unknown()
        self._send(last if metrics is not None else None, end=True)

    def _send(self, row: Mapping[str, Any] | None, end: bool = False) -> None:
        """Report `row`, or only the score of the last row if `row` is None. `end` says that the trial has ended."""
        from ray import tune

        shown = self._last if row is None else row
        news = {
            "score": score_of(shown, self._plan.metric, self._plan.mode), "progress": progress_of(shown, max(1, self._rows)),
            "row": row, "end": end, "cloned": self._cloned,
        }  # fmt: skip
        replace_text(self._file, json.dumps(shown))
        try:
            if not self._context.is_shared:
                tune.report(news)
                return
            with temporary_directory() as temporary:
                (temporary / _SOURCE).write_text(json.dumps({"trial": self._number}))
                tune.report(news, checkpoint=tune.Checkpoint.from_directory(str(temporary)))
        except SystemExit:
            raise Stopped(0) from None

    def _unknown(self) -> UnknownMetric:
        if self._names:
            return UnknownMetric(str(unknown_metric("metric", self._plan.metric, self._names)))
        return UnknownMetric(
            f"metric={self._plan.metric!r} was not reported, and no other metric was: train with a Trainer, or return metrics"
        )


def _is_number(value: Any) -> bool:
    """Return True if `value` is one number of Python, NumPy or a framework."""
    return not isinstance(value, (bool, Mapping)) and isinstance(_value(value), (int, float))


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with plain numbers and text. Arrays of one element become numbers."""
    return {str(name): _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # tensors of several elements raise RuntimeError
        return str(value)


# ------------------------------------------------------------------ the state of another trial


def _take_over(plan: SweepPlan, number: int) -> int | None:
    """Take over the state of another trial if Ray Tune asks for it: replace this trial's checkpoints by the newest
    checkpoint of the other trial.

    Returns:
        The number of the other trial, or None.
    """
    from ray import tune

    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        source = int(json.loads(Path(directory, _SOURCE).read_text())["trial"])
    if source == number:  # the trial itself was paused: its own directory is complete
        return None
    trials = plan.directory / "trials"
    own, new = trials / f"{number:05d}" / "checkpoints", trials / f"{number:05d}" / ".taken"
    if not _copied(trials / f"{source:05d}", new):
        return None
    shutil.rmtree(own, ignore_errors=True)
    new.rename(own)
    return source


def _copied(source: Path, target: Path) -> bool:
    """Copy the newest checkpoint of the trial in `source`, which may be running and prune checkpoints. Return False if the
    trial has none."""
    deadline = time.monotonic() + _COPY_S
    while time.monotonic() < deadline:
        shutil.rmtree(target, ignore_errors=True)
        newest = checkpoint_of(source)
        try:
            if newest is not None:
                shutil.copytree(newest, target / newest.name)
                return True
        except (OSError, shutil.Error):  # the checkpoint was pruned in the meantime
            continue
        time.sleep(0.1)  # wait for the first checkpoint of the trial
    shutil.rmtree(target, ignore_errors=True)
    return False
