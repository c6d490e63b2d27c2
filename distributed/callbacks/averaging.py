"""Average the weights of the model over updates: exponentially, or all alike (stochastic weight averaging)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.callbacks.base import AVERAGED_WEIGHTS, Callback
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState


class Averaging(Callback):
    """Keep averaged weights, evaluate with them, and leave them in the model at the end of training.

    Validation uses the averaged weights, so they also decide which checkpoint is the best. Checkpoints hold the trained and the
    averaged weights. A resumed run continues with both bit for bit, and an export reads the averaged weights. After `fit`, the
    model has the averaged weights. A further `fit` continues with the trained weights.
    """

    needs: ClassVar[tuple[str, ...]] = (AVERAGED_WEIGHTS,)

    def __init__(self) -> None:
        self.num_averaged = 0  # number of times that the trained weights were added to the average

    def on_train_start(self, state: TrainState) -> None:
        self.context.averaged_weights.start()
        self.context.averaged_weights.hide()

    def _average(self, weight: float) -> None:
        self.context.averaged_weights.update(weight)
        self.num_averaged += 1

    def on_validation_start(self, state: TrainState) -> None:
        if self.num_averaged:
            self.context.averaged_weights.show()

    def on_validation_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        self.context.averaged_weights.hide()

    def on_train_end(self, state: TrainState) -> None:
        if self.num_averaged:
            self.context.averaged_weights.show()
        else:
            self.context.notice(f"{type(self).__name__} has averaged nothing: training ended before its first update")

    def state_dict(self) -> dict[str, Any]:
        return {"num_averaged": self.num_averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_averaged = state["num_averaged"]


class ExponentialMovingAverage(Averaging):
    """Average the weights exponentially: `average = decay * average + (1 - decay) * weights` after each `every_n_steps` updates.

    Buffers, such as the statistics of BatchNorm, are those of the trained model.

    Args:
        decay: between 0 and 1. The average is mostly over the last `every_n_steps / (1 - decay)` updates.
        every_n_steps: the number of training updates between two updates of the average.
        warmup: whether the decay of update n of the average is at most `(1 + n) / (10 + n)`, so that the first weights are
            forgotten sooner. The formula is that of `tf.train.ExponentialMovingAverage(num_updates=n)`.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, decay: float = 0.999, *, every_n_steps: int = 1, warmup: bool = False) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ConfigError(f"decay={decay!r} must be between 0 and 1: set 0.999 to average over 1,000 updates")
        _check_every(every_n_steps)
        self.decay, self.every_n_steps, self.warmup = decay, every_n_steps, warmup

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.step % self.every_n_steps == 0:
            number = self.num_averaged + 1
            decay = min(self.decay, (1 + number) / (10 + number)) if self.warmup else self.decay
            self._average(1 - decay)


class WeightAveraging(Averaging):
    """Average the weights of the last part of training with equal weight (stochastic weight averaging).

    From `start_epoch` on, the weights at the end of each epoch are averaged. With `every_n_steps`, the weights after every
    `every_n_steps` updates are averaged instead. Set a constant or high learning rate for this part of training with a schedule.
    Before this part, validation uses the trained weights. Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima
    and Better Generalization".

    The statistics of BatchNorm are those of the trained weights, so a notice is shown for a model that has them.

    Args:
        start_epoch: the first epoch whose weights are averaged, from 0. The default is three quarters of `epochs`, rounded down. If
            `max_steps` ends training earlier, the default is three quarters of the epochs that are completed, rounded down. With
            `every_n_steps`, averaging then begins after three quarters of `max_steps` updates.
        every_n_steps: the number of training updates between two updates of the average. None means once at the end of each epoch.

    Raises:
        ConfigError: an argument is out of range. During `fit`: `epochs` ends training before `start_epoch`.
    """

    def __init__(self, start_epoch: int | None = None, *, every_n_steps: int | None = None) -> None:
        super().__init__()
        if start_epoch is not None and start_epoch < 0:
            raise ConfigError(f"start_epoch={start_epoch!r} must be 0 or more")
        if every_n_steps is not None:
            _check_every(every_n_steps)
        self.start_epoch, self.every_n_steps = start_epoch, every_n_steps
        self._start = self._start_step = 0

    def on_train_start(self, state: TrainState) -> None:
        epochs = self.context.config.epochs
        self._start, self._start_step = self._default_start() if self.start_epoch is None else (self.start_epoch, 0)
        if self._start >= epochs:
            raise ConfigError(
                f"WeightAveraging(start_epoch={self._start}) averages nothing in {epochs} epochs, which are counted from 0:"
                " lower start_epoch, or train longer"
            )
        if self.every_n_steps is None and self.context.num_samples is None:
            raise ConfigError(
                "WeightAveraging() averages at the end of epochs, and the length of a stream is not known: set every_n_steps"
            )
        if any("BatchNorm" in type(module).__name__ for module in self.context.model.modules()):
            self.context.notice(
                "the statistics of BatchNorm are those of the trained weights, not of the averaged ones"
            )
        super().on_train_start(state)

    def _default_start(self) -> tuple[int, int]:
        """Return the first epoch whose weights count, and the number of updates after which they do."""
        epochs, limit = self.context.config.epochs, self.context.config.max_steps
        per_epoch = self.context.updates_per_epoch
        if limit is None or (per_epoch is not None and limit >= per_epoch * epochs):
            return epochs * 3 // 4, 0
        if self.every_n_steps is not None or per_epoch is None:
            return 0, limit * 3 // 4
        if limit < per_epoch:
            raise ConfigError(
                f"max_steps={limit} ends training before the first epoch of {per_epoch} updates, and WeightAveraging() averages at"
                " the end of epochs: set every_n_steps, or raise max_steps"
            )
        return limit // per_epoch * 3 // 4, 0

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.epoch < self._start or state.step <= self._start_step:
            return
        every = self.every_n_steps
        if state.samples_in_epoch == self.context.num_samples if every is None else state.step % every == 0:
            self._average(1 / (self.num_averaged + 1))


def _check_every(every_n_steps: int) -> None:
    if every_n_steps < 1:
        raise ConfigError(f"every_n_steps={every_n_steps!r} must be 1 or more")
