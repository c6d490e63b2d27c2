"""Drive a fit from the loop of a script. The work of the fit is done between two batches and at the end of an epoch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distributed.backends.base import ShardedData
from distributed.callbacks import Callback
from distributed.data import num_micro_batches
from distributed.errors import ConfigError, TrainingError
from distributed.launching.heartbeat import Phase
from distributed.metrics.monitor import PREFIX
from distributed.runs.summary import was_interrupted
from distributed.state import StepResult
from distributed.training import loop
from distributed.training.own_logged import TRAINING, BatchWeights, LoggedValidation
from distributed.training.session import FitSession, OpenedFit
from distributed.training.validation import micro_batches

_LOOP = "'for epoch in s.epochs():'"
BREAK = "break"  # the `stop_reason` of a script that has left its loop over the epochs


class _Interrupted(BaseException):
    """Raised to leave the block of a Session after a signal. The rest of the block is not run."""


class KeptState(Callback):
    """Keep the values of the script in checkpoints."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values.clear()
        self.values.update(state)


class Loader:
    """The batches of this rank. Each iteration is one pass over the data.

    Attributes:
        dataset: the data set that was passed to `prepare`, or that of the loader that was passed.
    """

    def __init__(self, run: OwnRun, data: ShardedData, given: Any, *, is_training: bool) -> None:
        self._run, self._data, self._is_training = run, data, is_training
        self.dataset = given.dataset if hasattr(given, "batch_sampler") else given

    @property
    def batch_size(self) -> int:
        """The largest number of samples in a batch of this rank."""
        return self._data.batch.batch_size

    def __iter__(self) -> Iterator[Any]:
        return self._run.training_batches() if self._is_training else self._run.batches_of(self._data)

    def __len__(self) -> int:
        """Return the number of batches of each rank in one pass."""
        if self._data.num_samples is None:
            raise TypeError("the length of this loader is not known: it reads a stream")
        batch = self._data.batch
        full, rest = divmod(self._data.num_samples, batch.global_batch_size)
        return full * batch.gradient_accumulation_steps + (num_micro_batches(rest, batch) if rest else 0)


class OwnRun:
    """Train with the loop of a script. Every rank calls every method but `log`."""

    def __init__(
        self, fits: FitSession, opened: OpenedFit, loaders: Sequence[Any], leaving: contextlib.ExitStack
    ) -> None:
        self._fits, self._opened, self._leaving = fits, opened, leaving
        self._backend = fits.backend
        assert fits.backend.own_steps is not None  # `prepare` has set it, because the job says `is_own_loop`
        self.steps = fits.backend.own_steps
        self.model, self.optimizer = self.steps.model, self.steps.optimizer
        self.training_loader = Loader(self, opened.train, loaders[0], is_training=True)
        self.other_loaders = [
            Loader(self, data, given, is_training=False)
            for data, given in zip(opened.shards.values(), loaders[1:], strict=True)
        ]
        self.run_dir = opened.run.path.absolute()
        self._run: loop.Run | None = None
        self._validation = LoggedValidation()
        self._weights = BatchWeights(self._backend.logged, self._validation.logged)
        self._is_in_epoch = False
        self._is_epoch_read = False  # whether a loop over the training loader has come to the end of this epoch
        self._is_update_open = False  # whether a training batch was given out and its update is not made
        self._made: StepResult | None = None  # result of the newest update, until the loop comes back

    @property
    def run(self) -> loop.Run:
        """The run, which `begin` or the first epoch begins."""
        return self.begin(may_load=False) if self._run is None else self._run

    @property
    def step(self) -> int:
        """The number of updates so far, 0 before `begin`."""
        return 0 if self._run is None else self._run.state.step

    def begin(self, *, may_load: bool) -> loop.Run:
        """Begin to train, from a checkpoint if there is one. A collective. Raises ConfigError if it may not be loaded."""
        if self._run is not None:
            raise ConfigError("resume() was called too late: call it once, before the loop, save() and stop()")
        if not may_load and self._opened.found is not None:
            raise ConfigError(
                f"this run goes on from {self._opened.found.name}, but the script does not load it: call s.resume() after"
                " s.prepare(...)"
            )
        self._run = self._leaving.enter_context(self._fits.running(self._fits.start(self._opened)))
        self._leaving.push(self._end)
        loop.begin(self._run)
        # Metrics of a validation are logged after an epoch, see `_finish_epoch`.
        self._run.uncertain = [name for name in self._run.uncertain if not name.startswith(PREFIX)]
        self._enter_script()
        return self._run

    def _end(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End training, unless it has failed. Return whether `error` was raised only to leave the block. A collective."""
        self._leave()
        is_interrupted = isinstance(error, _Interrupted)
        if error is None or is_interrupted:
            self._settle()
            self._leave_epochs(self.run)
            loop.end(self.run)
        return is_interrupted

    def _leave_epochs(self, run: loop.Run) -> None:
        """Keep a row of the values that were logged since the last row, and end an epoch that was left by `break`. A collective."""
        state = run.state
        if was_interrupted(state):
            return
        is_left = self._is_in_epoch and state.stop_reason is None and state.samples_in_epoch > 0
        if is_left and state.epoch + self._is_epoch_read < run.config.epochs:
            state.stop_reason = BREAK
        is_validated = self._take_validation(run)
        if is_left and self._is_epoch_read:
            loop.finish_epoch(run)
        elif is_validated and not state.samples_in_epoch:
            loop.extend_last_row(run)

    # ------------------------------------------------------------------ epochs and batches

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that is left. A collective at the end of each."""
        run = self.run
        while self._has_epoch(run):
            self._is_in_epoch, self._is_epoch_read = True, False
            self._enter_script()
            yield run.state.epoch
            self._is_in_epoch = False
            if not self._settle() or run.state.stop_reason is not None or not self._finish_epoch(run):
                return

    def _has_epoch(self, run: loop.Run) -> bool:
        """Return whether an epoch is left, or the rest of one."""
        state = run.state
        is_over = not state.samples_in_epoch and state.step >= (run.config.max_steps or math.inf)
        if is_over and state.epoch < run.config.epochs and state.stop_reason is None:
            state.stop_reason = "max_steps"
        return state.epoch < run.config.epochs and state.stop_reason is None

    def training_batches(self) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch. Work that is due after an update is done at the next batch."""
        if not self._is_in_epoch:
            raise ConfigError(f"the training loader is read in an epoch: put its loop into {_LOOP}")
        run, steps = self.run, self.steps
        if not self._settle():  # the last loop over the loader was left after an update
            _leave_if_interrupted(run)
            return
        try:
            for update_batch in loop.update_batches(run):
                if not loop.enter(run):
                    _leave_if_interrupted(run)
                    return
                steps.begin(update_batch)
                self._update_batch, self._is_update_open = update_batch, True
                for index, micro in enumerate(update_batch.micro_batches):
                    batch = steps.enter(index)
                    self._weights.take(TRAINING, micro.num_samples)
                    yield batch
                    self._check_turn()
                    steps.leave()
                if self._is_update_open:
                    raise ConfigError("no update() was called for the last batch: call it after backward(loss)")
                if not self._settle():
                    _leave_if_interrupted(run)
                    return
            self._is_epoch_read = True
        finally:
            self._leave()

    def batches_of(self, data: ShardedData) -> Iterator[Any]:
        """Yield the batches of one pass over `data`. A signal ends the block. A collective at its beginning."""
        this_loop = object()
        self.steps.begin_evaluation()
        try:
            for micro in micro_batches(data.epoch(0)):
                if self._run is not None:
                    loop.enter_evaluation(self._run)
                    _leave_if_interrupted(self._run)
                self._weights.take(this_loop, micro.num_samples)
                with self.steps.evaluating(micro) as batch:
                    yield batch
        finally:
            self._weights.end(this_loop)
            self._enter_script()

    def _check_turn(self) -> None:
        if self.steps.is_owed:
            raise ConfigError("no backward(loss) was called for the last batch: call it once for each batch")

    def _leave(self) -> None:
        self.steps.leave()
        self._weights.end(TRAINING)
        self._is_update_open = False
        self._enter_script()

    def _enter_script(self) -> None:
        """Tell the launcher that code of the script runs, which may take any time."""
        if self._run is not None:
            self._run.heartbeat.mark(Phase.SCRIPT, self._run.state.step)

    def _finish_epoch(self, run: loop.Run) -> bool:
        """End the epoch with the metrics that were logged of its validation. A collective."""
        if not run.state.samples_in_epoch:
            raise ConfigError(f"an epoch made no update: put the loop over the training loader into {_LOOP}")
        config = run.config
        if not self._take_validation(run) and config.early_stopping_patience and config.monitor.startswith(PREFIX):
            raise ConfigError(
                f"early_stopping_patience={config.early_stopping_patience} watches {config.monitor!r}, and this epoch logged no"
                f" validation metric: call s.log({config.monitor!r}, value), or drop early_stopping_patience"
            )
        return loop.finish_epoch(run)

    def _take_validation(self, run: loop.Run) -> bool:
        """Add the metrics that were logged of a validation to the next row, and return whether there are any. A collective."""
        is_validated = self._backend.world.reduce({PREFIX: float(self._validation.logged.is_pending)})[PREFIX] > 0
        run.validation = self._validation if is_validated else None
        return is_validated

    # ------------------------------------------------------------------ what the loop calls

    def update(self) -> bool:
        """Make the update if the update batch is complete, and return whether it is. A collective."""
        if not self._is_update_open or self.steps.is_owed:
            raise ConfigError("update() comes after backward(loss), once for each batch of the training loader")
        if not self.steps.is_complete:
            return False
        self._made = self.steps.finish()
        self._is_update_open = False
        loop.count(self.run, self._update_batch, self._made)
        return True

    def log(self, name: str, value: Any, reduce: str) -> None:
        """Log a value of training, or of the validation. No collective."""
        if self._run is None:
            raise ConfigError(f"log({name!r}, ...) was called before training: call it after s.resume(), or in {_LOOP}")
        if name == "loss":
            if self.steps.own_loss.num_samples is None:
                raise ConfigError(
                    "log('loss', ...) is the loss of a training batch: call it in the loop over the training loader"
                )
            self.steps.own_loss.log(name, value, reduce)
        elif isinstance(name, str) and name.startswith(PREFIX):
            self._validation.log(name.removeprefix(PREFIX), value, reduce, self.step)
        else:
            self._backend.logged.log(name, value, reduce)

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all ranks. A collective."""
        return self.steps.gather(tensor, self._weights.num_samples)

    def save(self, path: Path | None) -> Path:
        """Save a checkpoint into the run, or into `path`. A collective."""
        if self._is_update_open:
            raise ConfigError(
                "save() was called within an update: call it after update(), or after the loop over the loader"
            )
        run = self.run
        self._settle()
        if path is not None:
            loop.collect(run)
            return self._fits.save(path)
        loop.save(run)
        loop.finish_save(run)
        if run.last_saved != (run.state.step, run.state.epoch) or self._fits.checkpoint is None:
            raise TrainingError(f"the checkpoint of step {run.state.step} could not be written: free disk space")
        return self._fits.checkpoint

    def _settle(self) -> bool:
        """Do what is due after the newest update. Return whether training goes on. A collective."""
        made, self._made = self._made, None
        if made is None:
            return True
        self.steps.report_own_loss(made)
        return loop.follow(self.run, made)


def _leave_if_interrupted(run: loop.Run) -> None:
    """Leave the block of the Session if a signal has ended training. All ranks have agreed on it."""
    if was_interrupted(run.state):
        raise _Interrupted
