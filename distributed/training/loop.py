"""Run the epochs and steps of a fit. This is the only loop, and it never looks inside a batch or a loss."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.backends.base import Backend, ShardedData
from distributed.callbacks import Callback, EarlyStopping
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, TrainingError
from distributed.metrics.monitor import (
    best_metrics,
    check_reported,
    is_among,
    names_of,
    not_yet_reported,
    uncertain,
    unknown_metric,
)
from distributed.runs.summary import was_interrupted
from distributed.state import MicroBatch, StepResult, Sums, TrainState, UpdateBatch
from distributed.training.common_step import STOP, CommonStep
from distributed.training.timing import TimeSplit

_EVAL_WINDOW = 256  # number of evaluation batches whose results are kept before they are summed


@dataclasses.dataclass
class Run:
    """Hold everything that a fit needs. `Session` builds it."""

    backend: Backend[Any]
    config: DistributedConfig
    train: ShardedData
    val: ShardedData | None
    state: TrainState
    common_step: CommonStep
    callbacks: Sequence[Callback]
    write_checkpoint: Callable[[], bool]  # a collective; returns False where the disk refused the checkpoint
    last_saved: tuple[int, int] = (-1, -1)  # (step, epoch) of the last checkpoint
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the user's metrics by name
    has_training_step: bool = False  # a training_step may report further metrics after the first update
    uncertain: Sequence[str] = ()  # monitors that the first update has to report
    # Those of the first evaluation, if one of its batches was read before.
    val_update_batches: Iterable[UpdateBatch] | None = None
    is_save_due: bool = False  # a save by `checkpoint_every_n_steps` waits for the metrics of the epoch
    is_over: bool = False  # whether the last checkpoint is saved
    window: list[StepResult] = dataclasses.field(default_factory=list)  # results of steps that are not summed yet
    window_start: float = 0.0
    is_measured: bool = False  # whether the metrics over all samples are up to date for the row of the epoch
    saved_s: float = 0.0  # seconds of checkpoints since `window_start`, already in `spent.total`
    spent: TimeSplit = dataclasses.field(default_factory=TimeSplit)

    def stop(self, reason: str) -> None:
        """End training for `reason`, as `FitContext.stop` does.

        Raises:
            ConfigError: if `reason` is empty, no string, or a reason that the loop itself uses.
        """
        if not isinstance(reason, str) or not reason.strip() or reason == "max_steps" or reason.startswith("signal "):
            raise ConfigError(f"stop({reason!r}) needs a reason in words: write stop('the loss is low enough')")
        if self.is_over:
            text = (
                f"stop({reason!r}) in on_train_end has no effect: training has ended, and its last checkpoint is saved"
            )
            self.backend.report({"kind": "warning", "text": text})
            return
        self.common_step.stop(str(reason))


def fit(run: Run) -> None:
    """Train until `epochs`, `max_steps`, a callback or a signal ends training. All ranks call it.

    A checkpoint of the last step is always saved.
    """
    state = run.state
    for callback in run.callbacks:
        callback.on_train_start(state)
    _agree_on_stop(run)
    run.uncertain = uncertain(
        _monitors(run), run.metrics, is_validated=run.val is not None, known=state.rows[-1] if state.rows else ()
    )
    if not state.samples_in_epoch:
        run.backend.measured.begin("train")
    if run.config.checkpoint_at_start and run.last_saved != (state.step, state.epoch):
        save(run)
    while state.epoch < run.config.epochs and state.stop_reason is None:
        if not _train_epoch(run) or not _finish_epoch(run):
            break
    _log(run, is_end=True)
    if state.stop_reason is not None and not was_interrupted(state) and state.samples_in_epoch:
        _measure_part(run)
    if run.last_saved != (state.step, state.epoch):
        save(run)
    if run.last_saved != (state.step, state.epoch):
        raise TrainingError(
            f"the last checkpoint, of step {state.step}, could not be written: free disk space and run again with --resume"
        )
    run.is_over = True
    for callback in run.callbacks:
        callback.on_train_end(state)


def _train_epoch(run: Run) -> bool:
    """Train the rest of the epoch, and return whether its end was reached.

    This is the hot path. Nothing in it waits for a device or for another rank, except the backend's own step.
    """
    state, tick, train_step, window = run.state, run.common_step.tick, run.backend.train_step, run.window
    hooks = [c.on_step_end for c in run.callbacks if type(c).on_step_end is not Callback.on_step_end]
    log_every = run.config.log_every_n_steps
    save_every = run.config.checkpoint_every_n_steps or math.inf
    limit = run.config.max_steps or math.inf
    run.window_start, run.saved_s = time.perf_counter(), 0.0
    for update_batch in run.spent.timed(run.train.epoch(state.epoch, state.samples_in_epoch)):
        if state.stop_reason is not None:  # set by a callback; all ranks agree on it at the log line
            return False
        if state.step >= limit:
            state.stop_reason = "max_steps"
            return False
        while (action := tick()) is not None:
            if not _act(run, action):
                return False
        result = train_step(update_batch)
        window.append(result)
        run.is_measured = False
        state.step += 1
        state.samples_in_epoch += update_batch.num_samples
        state.samples_seen += update_batch.num_samples
        if run.uncertain:
            _check_monitors(run, result)
        if state.step % log_every == 0:
            _log(run)
        for hook in hooks:
            hook(state, result)
        if state.step % save_every == 0:
            run.is_save_due = state.samples_in_epoch == run.train.num_samples or state.step >= limit
            if not run.is_save_due:
                save(run)
    return True


def _monitors(run: Run) -> Iterable[str]:
    """Yield the monitors of the best checkpoint and of early stopping."""
    name = run.config.monitor
    if run.config.keep_best and (run.val is not None or not name.startswith("val_")):
        yield name
    yield from (callback.monitor for callback in run.callbacks if isinstance(callback, EarlyStopping))


def _check_monitors(run: Run, result: StepResult) -> None:
    """Refuse a monitor that can never be reported, after the first update instead of after the first epoch. A collective.

    A `training_step` may report a metric now and then. A warning names a monitor that it has not reported yet. The
    row of the first epoch shows whether it is reported.
    """
    wanted, run.uncertain = run.uncertain, ()
    trained = dict.fromkeys([*run.backend.collect([result]), *run.backend.measured.names_over_all()])
    names = names_of(list(trained), is_validated=run.val is not None)
    missing = _missing(run, wanted, names)
    if run.val is not None and run.val.num_samples is not None and any(name.startswith("val_") for name in missing):
        names += _names_of_validation(run)
        missing = _missing(run, missing, names)
    for name in missing:
        if not _may_come(run, name):
            raise unknown_metric("monitor", name, dict.fromkeys(names))
        run.backend.report({"kind": "warning", "text": not_yet_reported(name, dict.fromkeys(names))})


def _missing(run: Run, wanted: Iterable[str], names: Sequence[str]) -> list[str]:
    several = run.backend.measured.names_over_all()
    return [name for name in wanted if not is_among(name, names, several)]


def _may_come(run: Run, name: str) -> bool:
    """Return whether a monitor that the first update did not report may be reported later."""
    if not name.startswith("val_"):
        return run.has_training_step
    return run.val is not None and (run.has_training_step or run.val.num_samples is None)


def _names_of_validation(run: Run) -> list[str]:
    """Evaluate one batch and return the names of its metrics, because a model may have metrics only in evaluation. A collective.

    The batch is kept for the first evaluation, so that the loader starts its workers once. A stream is not read here, because
    its loader would then wait until the end of the epoch.
    """
    assert run.val is not None
    update_batches = run.val.epoch(0)
    first = next(update_batches)
    run.val_update_batches = itertools.chain([first], update_batches)
    with run.backend.own_generators():
        names = [f"val_{name}" for name in run.backend.collect([run.backend.eval_step(first.micro_batches[0])])]
    run.backend.measured.begin("val")  # forget what the metrics over all samples have kept of the batch
    return names


def _act(run: Run, action: str) -> bool:
    """Do the `action` that all ranks agreed on, and return whether training goes on. A collective."""
    if action == "save":
        save(run)
        return True
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
    """Return `sums` added over all ranks, and stop all ranks if a callback on any rank asked to stop. A collective."""
    total = run.backend.world.reduce({**(sums or {}), STOP: float(bool(run.common_step.reasons))})
    if total.pop(STOP):
        _stop(run, next(reasons[0] for reasons in run.backend.world.gather(run.common_step.reasons) if reasons))
    return total


def _collect(run: Run) -> None:
    """Sum the results of the steps since the last call over all ranks. A collective, and the only host sync of training."""
    state = run.state
    if not run.window:
        return
    sums = run.backend.collect(run.window)
    now = time.perf_counter()
    seconds, run.window_start = now - run.window_start, now
    sums["samples_per_second"] = [(float(sum(result.num_samples for result in run.window)), seconds)]
    state.train_time_s += seconds
    run.spent.total += seconds - run.saved_s
    run.saved_s = 0.0
    run.spent.updates += len(run.window)
    run.window.clear()
    _add(state.log_sums, sums)
    _add(state.epoch_sums, sums)


def _add(into: dict[str, list[float]], sums: Mapping[str, Sums]) -> None:
    """Add `sums` to `into` step by step, so that the result does not depend on how many steps come at once."""
    for name, pairs in sums.items():
        total, count = into.get(name, (0.0, 0.0))
        for value, number in pairs:
            total += value
            count += number
        into[name] = [total, count]


def _log(run: Run, *, is_end: bool = False) -> None:
    """Log the means since the last log line. A collective.

    `is_end` tells that no further step of the epoch comes before its row.
    """
    _collect(run)
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


def _finish_epoch(run: Run) -> bool:
    """Log, validate, step the schedule, keep the row of the epoch, and save if a checkpoint is due. A collective.

    Returns False when a signal ended the validation.
    """
    _log(run, is_end=True)
    state = run.state
    row = _measure(run)
    if row is None:
        return False
    state.epoch += 1
    state.samples_in_epoch = 0
    state.epoch_sums, state.over_all = {}, {}
    run.backend.measured.begin("train")
    run.backend.end_epoch(row)
    _keep_row(run, row)
    for callback in run.callbacks:
        callback.on_epoch_end(state, row)
    _agree_on_stop(run)
    frequency = run.config.checkpoint_frequency
    if run.is_save_due or (frequency is not None and state.epoch % frequency == 0):
        save(run)
    return True


def _measure_part(run: Run) -> None:
    """Validate an epoch that `max_steps` or a callback cut off, and keep its row. A collective.

    The row is replaced when a resumed run finishes the epoch.
    """
    row = _measure(run)
    if row is not None:
        _keep_row(run, row)
        run.last_saved = (-1, -1)  # save again, so that the last checkpoint holds the row


def _measure(run: Run) -> dict[str, float] | None:
    """Return the row of the current epoch: means of training, and those of validation with the prefix `val_`. A collective.

    Returns None when a signal ended the validation.
    """
    state = run.state
    if not run.is_measured:
        _measure_training(run, is_end=True)
    row: dict[str, float] = {
        "epoch": state.epoch + 1,
        "step": state.step,
        **means_of(state.epoch_sums),
        **state.over_all,
    }
    if run.val is not None:
        update_batches, run.val_update_batches = run.val_update_batches, None
        measured = evaluate(run.backend, run.val, lambda: _tick_in_evaluation(run), update_batches)
        if measured is None:
            return None
        for callback in run.callbacks:
            callback.on_log(state, "val", measured)
        row |= {f"val_{name}": value for name, value in measured.items()}
    row["learning_rate"] = run.backend.learning_rates()[0]
    check_reported(run.config, row, is_validated=run.val is not None, earlier=state.rows)
    return row


def _keep_row(run: Run, row: dict[str, float]) -> None:
    """Keep the row of an epoch. It replaces an earlier row of a part of this epoch."""
    state = run.state
    state.rows = [kept for kept in state.rows if kept["epoch"] < row["epoch"]] + [row]
    state.best = best_metrics(state.rows, run.config, run.metrics)
    state.metrics.update({name: value for name, value in row.items() if name.startswith("val_")})


def _tick_in_evaluation(run: Run) -> bool:
    """Enter the next evaluation batch, and return True. Return False when a signal stops all ranks instead.

    A stop by a callback does not end the evaluation.
    """
    while (action := run.common_step.tick()) is not None:
        if not _act(run, action) and was_interrupted(run.state):
            return False
    return True


def means_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return name -> sum / count. The mean is NaN where the count is 0."""
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def save(run: Run) -> None:
    """Save a checkpoint now. A collective."""
    run.is_save_due = False
    _collect(run)
    began = time.perf_counter()
    is_saved = run.write_checkpoint()
    seconds = time.perf_counter() - began
    run.spent.checkpoint += seconds
    run.spent.total += seconds  # added here, because a checkpoint between two epochs is in no window
    run.saved_s += seconds
    if is_saved:
        run.last_saved = (run.state.step, run.state.epoch)


def evaluate(
    backend: Backend[Any],
    data: ShardedData,
    enter: Callable[[], bool] = lambda: True,
    update_batches: Iterable[UpdateBatch] | None = None,
) -> dict[str, float] | None:
    """Return the loss and the metrics over `data`, in which each sample counts once. A collective; the result is the same on all ranks.

    Returns None when `enter()`, which is called before each batch, returns False. Pass `update_batches` where reading those of `data`
    has begun already.
    """
    backend.measured.begin("val")
    sums: dict[str, list[float]] = {}
    window: list[StepResult] = []

    def settle() -> None:
        _add(sums, backend.collect(window))
        window.clear()

    for micro in micro_batches(data.epoch(0) if update_batches is None else update_batches):
        if not enter():
            return None
        window.append(backend.eval_step(micro))
        if len(window) == _EVAL_WINDOW:  # the same count on every rank
            settle()
    if window:
        settle()
    means = means_of(sums)
    over_all = backend.measured.measure("val", means)
    return means | over_all if over_all is not None else evaluate(backend, data, enter)


def micro_batches(update_batches: Iterable[UpdateBatch]) -> Iterable[MicroBatch]:
    """Yield the micro-batches of all update batches in order."""
    for update_batch in update_batches:
        yield from update_batch.micro_batches
