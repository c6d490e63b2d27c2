"""Run the epochs and steps of a fit. This is the only loop, and it never looks inside a batch or a loss."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distributed.backends.base import Backend, ShardedData
from distributed.callbacks import Callback, EarlyStopping
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, TrainingError
from distributed.launching.heartbeat import Heartbeat, Phase, heartbeat
from distributed.loggers.base import Recorder
from distributed.metrics.monitor import (
    PREFIX,
    best_metrics,
    check_reported,
    is_among,
    names_of,
    not_yet_reported,
    uncertain,
    unknown_metric,
)
from distributed.runs.summary import was_interrupted
from distributed.state import RATE, LoggedMedia, StepResult, TrainState, UpdateBatch
from distributed.training.common_step import STOP, CommonStep
from distributed.training.so_far import Peeked
from distributed.training.timing import TimeSplit
from distributed.training.validation import Validation, add, means_of, names_in

LOGGED = "logged"
_WAITS_EVERY = 10  # updates between two reports to the launcher of how long this rank has waited for others
_WAITS_EVERY_S = 0.05  # seconds that lie between them at least, because torch needs 50 us to tell
SAVED = "saved"  # the request of a save in the background that is over
SAVE, VALIDATE = "save", "validate"  # the requests of the clocks of `checkpoint_every_s` and `validate_every_s`


@dataclasses.dataclass
class Run:
    """Hold everything that a fit needs. `FitSession` builds it."""

    backend: Backend[Any]
    config: DistributedConfig
    train: ShardedData
    validation: Validation | None
    state: TrainState
    common_step: CommonStep
    callbacks: Sequence[Callback]
    write_checkpoint: Callable[[], bool]  # a collective; returns False if the checkpoint could not be written to disk
    # Waits for a checkpoint that is saved in the background, if there is one. A collective in its hooks only. Returns False if the
    # checkpoint could not be written to disk.
    finish_checkpoint: Callable[[], bool] = lambda: True
    write_snapshot: Callable[[], bool] | None = None  # a collective; None without `snapshot_every_n_steps`
    last_saved: tuple[int, int] = (-1, -1)  # (step, epoch) of the last checkpoint
    is_checkpoint_lost: Callable[[], bool] = lambda: False  # a collective; whether somebody deleted the last checkpoint
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the user's metrics by name
    has_training_step: bool = False  # a training_step may report further metrics after the first update
    uncertain: Sequence[str] = ()  # monitors that the first update has to report
    is_monitor_expected: bool = True  # whether it is an error that a row lacks the monitor of the best checkpoint
    is_save_due: bool = False  # a save is due and waits for the end of a validation or of the epoch
    is_validating: bool = False
    row_step: int = -1  # step of the newest row that this fit has kept
    # Means over the training of the epoch that ended last.
    epoch_row: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ended_means: Mapping[str, float] | None = None  # of training over the epoch that ends, while its hooks run
    # Set when a request of the clock of `validate_every_s` was done.
    validated: threading.Event = dataclasses.field(default_factory=threading.Event)
    is_over: bool = False  # whether the last checkpoint is saved
    # The hooks `on_step_end` of the callbacks that have one.
    on_step_end: Sequence[Callable[[TrainState, StepResult], None]] = ()
    heartbeat: Heartbeat = dataclasses.field(default_factory=heartbeat)  # says to the launcher where this rank is
    window: list[StepResult] = dataclasses.field(default_factory=list)  # results of steps that are not summed yet
    peeked: Peeked = dataclasses.field(default_factory=Peeked)  # sums of the window for callbacks
    window_start: float = 0.0
    waits_step: int = 0  # step of the newest report of waiting times to the launcher
    waits_asked: float = 0.0  # monotonic time at which the engine was asked for them
    is_measured: bool = False  # whether the metrics over all samples are up to date for the row of the epoch
    saved_s: float = 0.0  # seconds of checkpoints since `window_start`, already in `spent.total`
    spent: TimeSplit = dataclasses.field(default_factory=TimeSplit)

    @property
    def prefixes(self) -> Sequence[str]:
        """The prefix of the metrics of each validation set."""
        return () if self.validation is None else self.validation.prefixes

    @property
    def validates_by_steps(self) -> bool:
        """Return whether rows are those of validations that do not follow the epochs."""
        return self.validation is not None and self.config.validates_by_steps

    def stop(self, reason: str) -> None:
        """End training for `reason`, as `FitContext.stop` does.

        Raises:
            ConfigError: if `reason` is empty, is not a string, or is a reason that the loop itself uses.
        """
        if not isinstance(reason, str) or not reason.strip() or reason == "max_steps" or reason.startswith("signal "):
            raise ConfigError(f"stop({reason!r}) needs a reason in words: write stop('the loss is low enough')")
        if self.is_over:
            text = (
                f"stop({reason!r}) in on_train_end has no effect: training has ended, and its last checkpoint is saved"
            )
            self.backend.on_event({"kind": "warning", "text": text})
            return
        self.common_step.stop(str(reason))


def fit(run: Run) -> None:
    """Train until `epochs`, `max_steps`, a callback or a signal ends training. All ranks call it.

    A checkpoint of the last step is always saved.
    """
    state = run.state
    begin(run)
    while state.epoch < run.config.epochs and state.stop_reason is None:
        if not _train_epoch(run) or not finish_epoch(run):
            break
    end(run)


def begin(run: Run) -> None:
    """Call the hooks of the start, and validate or save if the settings ask for it. A collective."""
    state = run.state
    run.waits_step = state.step
    run.heartbeat.begin(state.step, compiles=run.config.compile, timeout_s=run.config.timeout_s)
    for callback in run.callbacks:
        callback.on_train_start(state)
    _agree_on_stop(run)
    run.uncertain = uncertain(
        _monitors(run), run.metrics, prefixes=run.prefixes, known=state.rows[-1] if state.rows else ()
    )
    if not state.samples_in_epoch:
        run.backend.measured.begin("train")
    if run.config.validate_at_start and run.validation is not None and not state.step and not state.rows:
        _validate(run)
    if run.config.checkpoint_at_start and run.last_saved != (state.step, state.epoch):
        save(run)


def end(run: Run) -> None:
    """Log, save the last checkpoint, and call the hooks of the end. A collective."""
    state = run.state
    run.heartbeat.mark(Phase.END, state.step, is_slow=True)
    _log(run, is_end=True)
    if not was_interrupted(state) and _lacks_row(run):
        _keep_last_row(run)
    finish_save(run)
    if run.last_saved == (state.step, state.epoch) and run.is_checkpoint_lost():
        run.last_saved = (-1, -1)
    if run.last_saved != (state.step, state.epoch):
        save(run)
        finish_save(run)
    if run.last_saved != (state.step, state.epoch):
        raise TrainingError(
            f"the last checkpoint, of step {state.step}, could not be written: free disk space and run again with --resume"
        )
    run.is_over = True
    run.heartbeat.mark(Phase.END, state.step, is_slow=True)
    # Recorders come last, because they record what the others log at the end.
    for callback in run.callbacks:
        if not isinstance(callback, Recorder):
            callback.on_train_end(state)
    _agree_on_stop(run)
    for recorder in _recorders(run):
        recorder.on_train_end(state)


def _train_epoch(run: Run) -> bool:
    """Train the rest of the epoch, and return whether its end was reached.

    This is the hot path. Nothing in it waits for a device or for another rank, except the backend's own step.
    """
    state, train_step = run.state, run.backend.train_step
    # A signal may have ended the validation of this step before.
    if state.samples_in_epoch and state.step % _validate_every(run) == 0 and not _validate(run):
        return False
    for update_batch in update_batches(run):
        if not enter(run):
            return False
        result = train_step(update_batch)
        count(run, update_batch, result)
        if not follow(run, result):
            return False
    return True


def update_batches(run: Run) -> Iterator[UpdateBatch]:
    """Call the hooks of the start of an epoch, start to measure the time, and return the update batches of the rest of the epoch.

    A collective.
    """
    state = run.state
    # The processes of a loader may start, and the data set may prepare itself.
    run.heartbeat.mark(Phase.DATA, state.step + 1, is_slow=True)
    if state.step < (run.config.max_steps or math.inf):
        for callback in run.callbacks:
            callback.on_epoch_start(state)
    run.window_start, run.saved_s = time.perf_counter(), 0.0
    run.train.seek(state.cursor)
    run.on_step_end = [c.on_step_end for c in run.callbacks if type(c).on_step_end is not Callback.on_step_end]
    return run.spent.timed(run.train.epoch(state.epoch, state.samples_in_epoch))


def enter(run: Run) -> bool:
    """Do what all ranks have agreed to do before the next update. Return whether there is a next update.

    A collective only if there is something to do.
    """
    state = run.state
    if state.stop_reason is not None:  # a callback asked to stop; all ranks have agreed on this at the log line
        return False
    if state.step >= (run.config.max_steps or math.inf):
        state.stop_reason = "max_steps"
        return False
    while (action := run.common_step.tick()) is not None:
        if not _act(run, action):
            return False
    run.heartbeat.mark(Phase.TRAINING, state.step + 1)
    return True


def count(run: Run, update_batch: UpdateBatch, result: StepResult) -> None:
    """Count an update that was made. No collective."""
    state = run.state
    run.window.append(result)
    run.is_measured = False
    state.step += 1
    state.samples_in_epoch += update_batch.num_samples
    state.samples_seen += update_batch.num_samples


def follow(run: Run, result: StepResult) -> bool:
    """Call the hooks after an update, then log, validate and save if that is due. Return whether training goes on.

    A collective only if something is due.
    """
    state, logged = run.state, run.backend.logged
    run.heartbeat.mark(Phase.CALLBACKS, state.step)
    if state.step % _WAITS_EVERY == 0 and run.heartbeat.is_read:
        _report_waits(run)
    if logged.is_pending:
        logged.attach(result, state.step)
    if run.uncertain:
        _check_monitors(run, result)
    for hook in run.on_step_end:
        hook(state, result)
    if logged.is_pending:
        logged.attach(result, state.step)
    if state.step % run.config.log_every_n_steps == 0:
        _log(run)
    if state.step % _validate_every(run) == 0 and not _validate(run):
        return False
    save_every = run.config.checkpoint_every_n_steps or math.inf
    if state.step % save_every == 0 and run.last_saved != (state.step, state.epoch):
        _save_or_wait(run)
    if run.write_snapshot is not None and not _is_last_step(run):
        _take_snapshot(run)
    run.heartbeat.mark(Phase.DATA, state.step + 1)
    return True


def _report_waits(run: Run) -> None:
    if (now := time.monotonic()) - run.waits_asked < _WAITS_EVERY_S:
        return
    run.waits_asked = now
    waited_s = run.backend.observer.newly_waited_s()
    if waited_s is not None:
        run.heartbeat.waited(waited_s, run.state.step - run.waits_step)
        run.waits_step = run.state.step


def _validate_every(run: Run) -> float:
    return (run.validation is not None and run.config.validate_every_n_steps) or math.inf


def _save_or_wait(run: Run) -> None:
    """Save now. If the row of the epoch or of the run follows this step, save after that row instead. A collective."""
    run.is_save_due = _is_last_step(run)
    if not run.is_save_due:
        save(run)


def _is_last_step(run: Run) -> bool:
    """Return whether the step that has ended is the last one before the row of the epoch or of the run."""
    state = run.state
    return state.samples_in_epoch == run.train.num_samples or state.step >= (run.config.max_steps or math.inf)


def _monitors(run: Run) -> Iterable[str]:
    """Yield the monitors of the best checkpoint and of early stopping."""
    name = run.config.monitor
    if run.config.keep_best and (run.validation is not None or not name.startswith(PREFIX)):
        yield name
    yield from (callback.monitor for callback in run.callbacks if isinstance(callback, EarlyStopping))


def _check_monitors(run: Run, result: StepResult) -> None:
    """Raise ConfigError after the first update for a monitor that can never be reported. A collective.

    A `training_step` need not report a metric in each update. If it has not reported a monitor yet, a warning is shown, and
    the row of the first epoch decides.
    """
    wanted, run.uncertain = run.uncertain, ()
    trained = dict.fromkeys([*names_in(run.backend.collect([result])), *run.backend.measured.names_over_all()])
    names = names_of(list(trained), run.prefixes)
    missing = _missing(run, wanted, names)
    validation = run.validation
    if validation is not None and not validation.has_stream and any(name.startswith(PREFIX) for name in missing):
        names += validation.first_names(run.backend)
        missing = _missing(run, missing, names)
    for name in missing:
        if not _may_come(run, name):
            raise unknown_metric("monitor", name, dict.fromkeys(names))
        run.backend.on_event({"kind": "warning", "text": not_yet_reported(name, dict.fromkeys(names))})


def _missing(run: Run, wanted: Iterable[str], names: Sequence[str]) -> list[str]:
    several = run.backend.measured.names_over_all()
    return [name for name in wanted if not is_among(name, names, several, run.prefixes)]


def _may_come(run: Run, name: str) -> bool:
    """Return whether a monitor that the first update did not report may be reported later."""
    if not name.startswith(PREFIX):
        return run.has_training_step
    return run.validation is not None and (run.has_training_step or run.validation.has_stream)


def _act(run: Run, action: str) -> bool:
    """Do the `action` on which all ranks have agreed, and return whether training continues. A collective."""
    if action == SAVE:
        if run.is_validating:
            run.is_save_due = True
        else:
            save(run)
        return True
    if action == SAVED:
        if not run.is_validating:  # otherwise the next save or the end of training finishes it
            finish_save(run)
        return True
    if action == VALIDATE:
        if _has_trained(run) and not run.is_validating and not _validate(run):
            return False
        run.validated.set()
        return run.state.stop_reason is None
    if action.startswith(STOP):
        _stop(run, action.removeprefix(STOP))
    else:
        run.state.stop_reason = action
    return False


def _stop(run: Run, reason: str) -> None:
    """End training at this step for the `reason` of a callback. All ranks do the same."""
    if run.state.stop_reason is None:
        run.state.stop_reason = reason
        run.last_saved = (-1, -1)  # save again, so that the last checkpoint holds the reason


def _agree_on_stop(run: Run, sums: Mapping[str, float] | None = None) -> dict[str, float]:
    """Return `sums` added over all ranks, and do what callbacks on any rank asked for: stop, or log values. A collective."""
    asked = {STOP: float(bool(run.common_step.reasons)), LOGGED: float(run.backend.logged.is_pending)}
    total = run.backend.world.reduce({**(sums or {}), **asked})
    if total.pop(STOP):
        _stop(run, next(reasons[0] for reasons in run.backend.world.gather(run.common_step.reasons) if reasons))
    if total.pop(LOGGED):
        _record_logged(run)
    return total


def _record_logged(run: Run) -> None:
    """Record the values that hooks of any rank have logged since the last step, and all media. A collective."""
    state, logged, world = run.state, run.backend.logged, run.backend.world
    result = StepResult([])
    sums: dict[str, list[float]] = {}
    logged.attach(result)
    add(sums, run.backend.collect([result]))
    values = means_of(sums)
    state.metrics.update(values)
    media = logged.take_media(state.step)
    if world.reduce({LOGGED: float(any(each.rank is not None for each in media))})[LOGGED]:
        media = [LoggedMedia(**each) for part in world.gather(list(map(vars, media))) for each in part]
    for recorder in _recorders(run):
        if values:
            recorder.record_values(state, values)
        for each in media:
            recorder.record_media(state, each)


def _recorders(run: Run) -> list[Recorder]:
    return [callback for callback in run.callbacks if isinstance(callback, Recorder)]


def collect(run: Run) -> None:
    """Sum the results of the steps since the last call over all ranks. A collective, and the only host sync of training."""
    state = run.state
    if not run.window:
        return
    sums = run.backend.collect(run.window)
    now = time.perf_counter()
    seconds, run.window_start = now - run.window_start, now
    sums |= {name: [(sum(total for total, _ in sums[name]), seconds)] for name in sums if name.endswith(RATE)}
    sums["samples_per_second"] = [(float(sum(result.num_samples for result in run.window)), seconds)]
    state.train_time_s += seconds
    run.spent.total += seconds - run.saved_s
    run.saved_s = 0.0
    run.spent.updates += len(run.window)
    run.window.clear()
    run.peeked = Peeked()
    add(state.log_sums, sums)
    add(state.epoch_sums, sums)


def _log(run: Run, *, is_end: bool = False) -> None:
    """Log the means since the last log line. A collective.

    `is_end` says that the row of the epoch is made before any further step.
    """
    collect(run)
    state = run.state
    if not state.log_sums:
        return
    means = means_of(state.log_sums)
    _measure_training(run, is_end=is_end or state.samples_in_epoch == run.train.num_samples)
    means |= state.over_all
    means["learning_rate"] = run.backend.learning_rates()[0]
    if (norm := run.backend.observer.gradient_norm()) is not None:
        means["grad_norm"] = norm
    state.log_sums = {}
    state.metrics.update(means)
    context = run.backend.world.context
    for callback in run.callbacks:
        callback.on_log(state, "train", means)
    times = run.spent.take(
        run.backend.observer.waited_s(), context.rank, context.world_size, functools.partial(_agree_on_stop, run)
    )
    for callback in run.callbacks:
        callback.on_times(state, times)


def _measure_training(run: Run, *, is_end: bool) -> None:
    run.state.over_all = run.backend.measured.measure("train", means_of(run.state.epoch_sums), is_end=is_end) or {}
    run.is_measured = is_end


def _validate(run: Run) -> bool:
    """Validate inside an epoch or before the first update, unless this step was validated. A collective.

    Then step a schedule that watches a metric, keep the row, and save if the monitor is better than before. Returns False if a
    signal ended the validation.
    """
    state = run.state
    if state.has_row:
        return True
    collect(run)
    row = _measure(run, is_validated=True)
    if row is None:
        return False
    if state.step:
        run.backend.step_schedule(row, is_epoch_end=False)
    is_better = _keep_row(run, row)
    _end_validation(run, row)
    _agree_on_stop(run)
    if run.is_save_due or (is_better and run.validates_by_steps):
        _save_or_wait(run)
    run.window_start, run.saved_s = time.perf_counter(), 0.0
    return True


def finish_epoch(run: Run) -> bool:
    """Log, validate, step the schedule, keep the row of the epoch, and save if a checkpoint is due. A collective.

    If validations do not follow the epochs, an epoch has no row, except for the last one. Returns False if a signal ended the
    validation.
    """
    _log(run, is_end=True)
    state, is_by_steps = run.state, run.validates_by_steps
    has_row = not is_by_steps or (_is_end(run) and not state.has_row)
    run.heartbeat.mark(Phase.CALLBACKS, state.step, is_slow=True)
    row = _measure(run, is_validated=has_row)
    if row is None:
        return False
    if has_row:
        _keep_row(run, row, is_open=is_by_steps)
        _end_validation(run, row)
    run.epoch_row = row
    run.ended_means = means_of(state.epoch_sums)
    state.epoch += 1
    state.samples_in_epoch = 0
    state.epoch_sums, state.over_all = {}, {}
    run.backend.measured.begin("train")
    run.backend.step_schedule(None if is_by_steps else row, is_epoch_end=True)
    for callback in run.callbacks:
        callback.on_epoch_end(state, row)
    run.ended_means = None
    _agree_on_stop(run)
    frequency = run.config.checkpoint_frequency
    if run.is_save_due or (frequency is not None and state.epoch % frequency == 0):
        save(run)
    if run.write_snapshot is not None:
        _take_snapshot(run)
    return True


def _is_end(run: Run) -> bool:
    """Return whether training ends with the epoch that ends now."""
    state, config = run.state, run.config
    return state.epoch + 1 >= config.epochs or state.step >= (config.max_steps or math.inf)


def _lacks_row(run: Run) -> bool:
    """Return whether training has ended at a step that has no row: in an epoch, or after the last validation."""
    state = run.state
    if run.validates_by_steps:
        return state.step > 0 and not state.has_row and run.row_step != state.step
    return state.stop_reason is not None and state.samples_in_epoch > 0


def _keep_last_row(run: Run) -> None:
    """Validate at the end of training, and keep the row until a resumed run replaces it. A collective."""
    row = _measure(run, is_validated=True)
    if row is not None:
        _keep_row(run, row, is_open=True)
        _end_validation(run, row)
        run.last_saved = (-1, -1)  # save again, so that the last checkpoint holds the row


def extend_last_row(run: Run) -> None:
    """Validate after the last epoch, and add the metrics to its row. A collective."""
    state = run.state
    row = _measure(run, is_validated=True)
    if row is None:
        return
    if state.rows and state.rows[-1]["step"] == state.step:
        row, state.is_last_row_open = {**state.rows[-1], **row}, True  # replaces that row
    _keep_row(run, row)
    _end_validation(run, row)
    run.last_saved = (-1, -1)  # save again, so that the last checkpoint holds the row


def _measure(run: Run, *, is_validated: bool) -> dict[str, float] | None:
    """Return a row: means over the training of the epoch so far, and the metrics of the validation sets. A collective.

    Returns None if a signal ended the validation.
    """
    state = run.state
    if not run.is_measured and state.step:
        _measure_training(run, is_end=True)
    row: dict[str, float] = {"epoch": state.epoch_in_words, "step": state.step, **_training_of(run)}
    if run.validation is not None and is_validated:
        measured = _measure_validation(run, run.validation)
        if measured is None:
            return None
        for callback in run.callbacks:
            callback.on_log(state, "val", measured)
        row |= {f"{PREFIX}{name}": value for name, value in measured.items()}
    row["learning_rate"] = run.backend.learning_rates()[0]
    if is_validated and state.samples_in_epoch and run.is_monitor_expected:
        check_reported(run.config, row, is_validated=run.validation is not None, earlier=state.rows)
    return row


def _training_of(run: Run) -> dict[str, float]:
    """Return the means over the training of the epoch so far, or of the epoch that has just ended."""
    state = run.state
    if state.samples_in_epoch:
        return {**means_of(state.epoch_sums), **state.over_all}
    rows = (row for row in (run.epoch_row, *state.rows[-1:]) if row and row["step"] == state.step)
    return {
        name: value
        for name, value in next(rows, {}).items()
        if name not in ("epoch", "step", "learning_rate") and not name.startswith(PREFIX)
    }


def _has_trained(run: Run) -> bool:
    """Return whether there are means over training for the row of a validation."""
    return run.state.samples_in_epoch > 0 or run.epoch_row.get("step", 0) == run.state.step > 0


def _measure_validation(run: Run, validation: Validation) -> dict[str, float] | None:
    run.heartbeat.mark(Phase.CALLBACKS, run.state.step, is_slow=True)
    for callback in run.callbacks:
        callback.on_validation_start(run.state)
    run.is_validating = True
    run.heartbeat.mark(Phase.VALIDATION, run.state.step, is_slow=True)
    with run.backend.logged.set_aside():  # what the hooks logged is no metric of the validation
        measured = validation.measure(run.backend, lambda: enter_evaluation(run))
    run.is_validating = False
    run.heartbeat.mark(Phase.CALLBACKS, run.state.step, is_slow=True)
    if measured is None:
        _end_validation(run, {})
    return measured


def _end_validation(run: Run, row: Mapping[str, float]) -> None:
    for callback in run.callbacks if run.validation is not None else ():
        callback.on_validation_end(run.state, row)


def _keep_row(run: Run, row: dict[str, float], *, is_open: bool = False) -> bool:
    """Keep the row, and return whether its monitor is better than before. It replaces the newest row if that one is open."""
    state, monitor = run.state, run.config.monitor
    stay = state.rows[:-1] if state.is_last_row_open else state.rows
    before = best_metrics(stay, run.config, run.metrics, run.prefixes) if state.is_last_row_open else state.best
    state.rows = [*stay, row]
    state.is_last_row_open, run.row_step = is_open, state.step
    state.best = best_metrics(state.rows, run.config, run.metrics, run.prefixes)
    state.metrics.update({name: value for name, value in row.items() if name.startswith(PREFIX)})
    return run.config.keep_best and monitor in row and state.best.get(monitor) != before.get(monitor)


def enter_evaluation(run: Run) -> bool:
    """Enter the next evaluation batch and return True. Return False if a signal stops all ranks instead.

    A stop by a callback does not end the evaluation.
    """
    while (action := run.common_step.tick()) is not None:
        if not _act(run, action) and was_interrupted(run.state):
            return False
    run.heartbeat.mark(Phase.VALIDATION, run.state.step, is_slow=True)
    return True


def _record_pending(run: Run) -> None:
    """Record what hooks of any rank have logged, if there is anything. A collective."""
    if run.backend.world.reduce({LOGGED: float(run.backend.logged.is_pending)})[LOGGED]:
        _record_logged(run)


def _cursor(run: Run) -> dict[str, Any] | None:
    """Return the position in the data, with the positions of all ranks if each reads a part of its own. A collective."""
    state, train = run.state, run.train
    mine = train.cursor(state.samples_in_epoch) if state.samples_in_epoch else None
    if not train.has_own_cursor or not state.samples_in_epoch:
        return mine
    return {"epoch": state.epoch, "samples": state.samples_in_epoch, "ranks": run.backend.world.gather(mine)}


def save(run: Run) -> None:
    """Save a checkpoint now, or begin to save it in the background. A collective."""
    run.is_save_due = False
    if _store(run, lambda: _finish_and_write(run)):
        run.last_saved = (run.state.step, run.state.epoch)


def _finish_and_write(run: Run) -> bool:
    finish_save(run)
    return run.write_checkpoint()


def _take_snapshot(run: Run) -> None:
    """Keep a snapshot in memory if one is due and this state is not in a checkpoint. A collective.

    A checkpoint that is saved in the background does not count, because it is committed later, or not at all.
    """
    state, every = run.state, run.config.snapshot_every_n_steps
    is_saved = run.last_saved == (state.step, state.epoch) and not run.config.checkpoint_async
    if every is not None and state.step % every == 0 and not is_saved:
        assert run.write_snapshot is not None
        _store(run, run.write_snapshot)


def _store(run: Run, write: Callable[[], bool]) -> bool:
    """Store the state with `write`, and count the time. Return what `write` returns. A collective."""
    run.heartbeat.mark(Phase.SAVING, run.state.step, is_slow=True)
    collect(run)
    # A resumed run does not repeat the steps before the checkpoint, so nothing that they logged may wait longer.
    _record_pending(run)
    began = time.perf_counter()
    run.state.cursor = _cursor(run)
    is_stored = write()
    _record_pending(run)  # values that `on_checkpoint` logged
    seconds = time.perf_counter() - began
    run.spent.checkpoint += seconds
    run.spent.total += seconds  # added here, because a checkpoint between two epochs belongs to no window
    run.saved_s += seconds
    run.heartbeat.mark(Phase.CALLBACKS, run.state.step, is_slow=True)
    return is_stored


def finish_save(run: Run) -> None:
    """Wait for the checkpoint that is saved in the background, if there is one, and call its hooks. A collective in the hooks only."""
    if not run.finish_checkpoint():
        run.last_saved = (-1, -1)  # the state is saved again at the end of training
