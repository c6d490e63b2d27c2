"""The only epoch and step loop. Knows no framework: it never looks inside a batch or a loss."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.backends.base import Backend, ShardedData
from distributed.callbacks import Callback
from distributed.common_step import CommonStep
from distributed.config import DistributedConfig
from distributed.errors import TrainingError
from distributed.state import Group, MicroBatch, StepResult, TrainState

_EVAL_WINDOW = 256  # evaluation batches whose results are kept before they are summed up


@dataclasses.dataclass
class Run:
    """Everything a fit needs, put together by Trainer."""

    backend: Backend[Any]
    config: DistributedConfig
    train: ShardedData
    val: ShardedData | None
    state: TrainState
    common_step: CommonStep
    callbacks: Sequence[Callback]
    write_checkpoint: Callable[[], bool]  # of this moment, on all ranks; False where the disk refused it
    last_saved: tuple[int, int] = (-1, -1)  # (step, epoch)
    window: list[StepResult] = dataclasses.field(default_factory=list)  # steps not summed up yet
    window_start: float = 0.0


def fit(run: Run) -> None:
    """Train until the epochs, the steps, early stopping or a signal end it; always saves at its last step. All ranks."""
    state = run.state
    for callback in run.callbacks:
        callback.on_train_start(state)
    while state.epoch < run.config.epochs and state.stop_reason is None:
        if not _train_epoch(run) or not _finish_epoch(run):
            break
    _log(run)
    if run.last_saved != (state.step, state.epoch):
        save(run)
    if run.last_saved != (state.step, state.epoch):
        raise TrainingError(
            f"the last checkpoint, of step {state.step}, could not be written: make room and run again with --resume"
        )
    for callback in run.callbacks:
        callback.on_train_end(state)


def _train_epoch(run: Run) -> bool:
    """The rest of the epoch; whether it came to its end. The hot path: nothing waits for a device or another rank
    but the backend's own step."""
    state, tick, train_step, window = run.state, run.common_step.tick, run.backend.train_step, run.window
    hooks = [c.on_step_end for c in run.callbacks if type(c).on_step_end is not Callback.on_step_end]
    log_every = run.config.log_every_n_steps
    save_every = run.config.checkpoint_every_n_steps or math.inf
    limit = run.config.max_steps or math.inf
    run.window_start = time.perf_counter()
    for group in run.train.epoch(state.epoch, state.samples_in_epoch):
        if state.step >= limit:
            state.stop_reason = "max_steps"
            return False
        while (action := tick()) is not None:
            if not _act(run, action):
                return False
        result = train_step(group)
        window.append(result)
        state.step += 1
        state.samples_in_epoch += group.num_samples
        state.samples_seen += group.num_samples
        if state.step % log_every == 0:
            _log(run)
        for hook in hooks:
            hook(state, result)
        if state.step % save_every == 0:
            if state.samples_in_epoch == run.train.num_samples:
                _log(run)  # the epoch's last line is due: a resume after this save no longer knows the gradient's norm
            save(run)
    return True


def _act(run: Run, action: str) -> bool:
    """Do what all ranks agreed to do now; whether training goes on."""
    if action == "save":
        save(run)
        return True
    run.state.stop_reason = action
    return False


def _collect(run: Run) -> None:
    """Sum up the steps since the last call, over all ranks. The only host sync of training."""
    state = run.state
    if not run.window:
        return
    sums = run.backend.collect(run.window)
    now = time.perf_counter()
    seconds, run.window_start = now - run.window_start, now
    sums["samples_per_second"] = (float(sum(result.num_samples for result in run.window)), seconds)
    state.train_time_s += seconds
    run.window.clear()
    for name, (total, count) in sums.items():
        for into in (state.log_sums, state.epoch_sums):
            before = into.get(name, (0.0, 0.0))
            into[name] = [before[0] + total, before[1] + count]


def _log(run: Run) -> None:
    """Show what happened since the last log line."""
    _collect(run)
    state = run.state
    if not state.log_sums:
        return
    means = means_of(state.log_sums)
    means["learning_rate"] = run.backend.learning_rates()[0]
    if (norm := run.backend.gradient_norm()) is not None:
        means["grad_norm"] = norm
    state.log_sums = {}
    state.metrics.update(means)
    for callback in run.callbacks:
        callback.on_log(state, "train", means)


def _finish_epoch(run: Run) -> bool:
    """Log, validate, schedule, remember the best, save if due. False when a signal ended the validation."""
    _log(run)
    state = run.state
    row: dict[str, float] = {"epoch": state.epoch + 1, "step": state.step, **means_of(state.epoch_sums)}
    if run.val is not None:
        measured = evaluate(run.backend, run.val, lambda: _tick_in_evaluation(run))
        if measured is None:
            return False
        for callback in run.callbacks:
            callback.on_log(state, "val", measured)
        row |= {f"val_{name}": value for name, value in measured.items()}
    row["learning_rate"] = run.backend.learning_rates()[0]
    state.metrics.update({name: value for name, value in row.items() if name.startswith("val_")})
    state.epoch += 1
    state.samples_in_epoch = 0
    state.epoch_sums = {}
    run.backend.end_epoch(row)
    state.rows.append(row)
    _remember_best(state, row)
    for callback in run.callbacks:
        callback.on_epoch_end(state, row)
    due = run.config.checkpoint_frequency
    if due is not None and state.epoch % due == 0:
        save(run)
    return True


def _tick_in_evaluation(run: Run) -> bool:
    """Enter the next evaluation batch; False when all ranks stop here instead."""
    while (action := run.common_step.tick()) is not None:
        if not _act(run, action):
            return False
    return True


def means_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """name -> sum / count, NaN where nothing was counted."""
    return {name: total / count if count else math.nan for name, (total, count) in sums.items()}


def _remember_best(state: TrainState, row: Mapping[str, float]) -> None:
    for name, value in row.items():
        if name in ("epoch", "step", "learning_rate", "samples_per_second") or math.isnan(value):
            continue
        better = max if is_larger_better(name) else min
        state.best[name] = better(state.best.get(name, value), value)


def is_larger_better(name: str) -> bool:
    """Whether `best_metrics` keeps the largest value of `name`: of everything but losses, errors and perplexities."""
    words = name.lower()
    return not any(word in words for word in ("loss", "error", "perplexity", "mse", "mae", "nll"))


def save(run: Run) -> None:
    """A checkpoint now. All ranks."""
    _collect(run)
    if run.write_checkpoint():
        run.last_saved = (run.state.step, run.state.epoch)


def evaluate(
    backend: Backend[Any], data: ShardedData, enter: Callable[[], bool] = lambda: True
) -> dict[str, float] | None:
    """Means over `data`, each sample once, on all ranks; None when `enter()` says to stop before the end."""
    sums: dict[str, list[float]] = {}
    window: list[StepResult] = []

    def settle() -> None:
        for name, (total, count) in backend.collect(window).items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = [before[0] + total, before[1] + count]
        window.clear()

    for micro in micro_batches(data.epoch(0)):
        if not enter():
            return None
        window.append(backend.eval_step(micro))
        if len(window) == _EVAL_WINDOW:  # the same count on every rank
            settle()
    if window:
        settle()
    return means_of(sums)


def micro_batches(groups: Iterable[Group]) -> Iterable[MicroBatch]:
    """The micro-batches of all groups in order."""
    for group in groups:
        yield from group.micro_batches
