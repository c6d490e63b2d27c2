"""Define the base class of callbacks, and the objects that their hooks may use."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig
    from distributed.state import StepResult, TrainState, WorkerContext


# What a callback may need of a backend. The values name it in messages and in the table of `distributed backends`.
GRADIENTS = "gradients in hooks"
AVERAGED_WEIGHTS = "averaged weights"
SAMPLES = "samples in hooks"
COUNTS = "counted updates"
NEEDS = (GRADIENTS, AVERAGED_WEIGHTS, SAMPLES, COUNTS)


class AveragedWeights(Protocol):
    """A second set of the model's weights, which the backend keeps beside the trained ones.

    It is sharded like the model and is stored in checkpoints. Code that reads weights from a checkpoint, such as
    `export`, gets the averaged weights. So does the model of the process that started workers. Buffers, such as the statistics of
    BatchNorm, are not averaged. Every rank calls every method. No method is a collective.
    """

    def start(self) -> None:
        """Begin with a copy of the trained weights, unless a checkpoint has filled the averaged ones."""

    def update(self, weight: float) -> None:
        """Replace each averaged weight by `(1 - weight) * averaged + weight * trained`.

        Args:
            weight: the weight of the trained values, from 0 to 1.
        """

    def show(self) -> None:
        """Put the averaged weights into the model. The trained weights are kept aside."""

    def hide(self) -> None:
        """Put the trained weights back into the model."""


class Observed(Protocol):
    """Interface through which a callback observes the model and its updates. Every rank calls every method."""

    @property
    def cuts_weights(self) -> bool:
        """True if a rank holds pieces of the parameters, so that it cannot run the model by itself."""

    def sampling(self, seed: int) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
        """Return a context manager in which the model may be called: in evaluation mode, without gradients, seeded by `seed`.

        Entering it returns a function that moves tensors to the model's device and element type. Averaged weights are used if
        there are any. Training continues as if the block had not run. Entering the block is a collective. With sharded weights,
        each forward pass in the block is a collective too.
        """

    def count_updates(self, *, counts_flops: bool) -> None:
        """Fill `counted` from the next update on. With `counts_flops`, count the FLOPs of the first of these updates."""

    @property
    def counted(self) -> Counted:
        """The counts of the newest update."""

    @property
    def computes_in(self) -> str:
        """The element type of matrix products: "bfloat16", "float16", "float32" or "float64"."""

    @property
    def device_name(self) -> str:
        """The name of this rank's GPU, such as "NVIDIA H100 80GB HBM3", or "" on a CPU."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of one update.

    Attributes:
        num_samples: the samples of this rank.
        num_tokens: the tokens of this rank, or 0 if the batch holds none.
        flops_per_sample: the FLOPs of the first counted update over all ranks, divided by its samples. 0 if not counted.
        flops_per_token: the same divided by its tokens. 0 if not counted, or without tokens.
    """

    num_samples: int = 0
    num_tokens: int = 0
    flops_per_sample: float = 0.0
    flops_per_token: float = 0.0


@dataclasses.dataclass(frozen=True)
class FitContext:
    """Objects that the hooks of a callback may use, as `self.context`. Created once per fit, on every rank.

    Attributes:
        model: the user's module, without the wrapper of the backend. With `fsdp` and ZeRO-3 each rank holds a part of
            each parameter.
        optimizer: the optimizer that updates it. With several models, `model[NAME]` and `optimizer[NAME]` belong to one of them.
        config: the settings of this fit.
        run_dir: the absolute path of the run directory.
        stop: `stop(reason)` ends training on all ranks after the same step. One call on any rank is enough. The run
            then counts as finished, saves a checkpoint at that step and has `reason` as its `stop_reason`. Called
            in `on_train_start`, `on_log`, `on_validation_end` or `on_epoch_end`, `stop` takes effect immediately. Called
            in another hook, it takes effect immediately with one process, and within some tenths of a second with
            several. Called in `on_train_end`, it has no effect and logs a warning.
        save: `save()` asks for a checkpoint. One call on any rank is enough. The checkpoint is saved before the next update
            with one process, and within some tenths of a second with several.
        evaluate: `evaluate(data)` returns the loss and the metrics over `data` as `Trainer.evaluate` does. A collective:
            every rank must call it in the same hook. It does not change the results of training.
        notice: `notice(text)` shows a line on the display of the main process. Calls on other ranks do nothing.
        num_samples: the number of samples in an epoch, over all ranks. None for a stream of unknown length.
        named_parameters: `named_parameters()` returns pairs (name, parameter) of the model, by the names of its source code, or of
            a Keras model such as "dense.kernel". Other backends than those of torch return none.
        averaged_weights: a second set of weights. Only callbacks with `AVERAGED_WEIGHTS` in `needs` may use it.
        log: `log(name, value, reduce="mean", on_every_rank=False)`, the same as `Trainer.log`.
        log_rate: `log_rate(name, amount)` logs the sum of the amounts of all ranks, per second of training, with the next log line.
            Call it in `on_step_end`.
        worker: the rank, the world size and the device of this process.
        observer: observes the model and its updates. Only callbacks with `SAMPLES` or `COUNTS` in `needs` may use it.
        processing_class: the tokenizer or the processor that `Trainer` was given, or None.
        updates_per_epoch: the number of updates in an epoch. None for a stream of unknown length.
        means_of_epoch: `means_of_epoch()` returns the loss and the metrics of training over the current epoch so far. A collective:
            every rank must call it in the same hook. It waits for the device.
    """

    model: Any
    optimizer: Any
    config: DistributedConfig
    run_dir: Path
    stop: Callable[[str], None]
    save: Callable[[], None]
    evaluate: Callable[[Any], dict[str, float]]
    notice: Callable[[str], None]
    num_samples: int | None
    named_parameters: Callable[[], list[tuple[str, Any]]]
    averaged_weights: AveragedWeights
    log: Callable[..., None]
    log_rate: Callable[[str, Any], None]
    worker: WorkerContext
    observer: Observed
    updates_per_epoch: int | None
    means_of_epoch: Callable[[], dict[str, float]]
    processing_class: Any = None


class Callback:
    """Base class of callbacks. Override the hooks that you need.

    Every hook runs on every rank, with the same metrics. The hooks of several callbacks run in the order in which the callbacks
    were given to the trainer. Early stopping by settings comes after them, and then the loggers. An error in a hook ends the run as an
    error in a training step does. During a fit `self.context` is a `FitContext`. Do not change `state`.

    `state_dict` and `load_state_dict` make the state of a callback part of the checkpoint. The main process's state is
    saved, and on resume every rank gets it.

    Attributes:
        needs: what the callback needs of the backend: some of `NEEDS`. A backend without it refuses the callback before
            training. A callback that overrides `on_before_update` needs `GRADIENTS` in any case.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    __context: FitContext | None = None  # two underscores, so that no attribute of a subclass collides with it

    @property
    def trains_later(self) -> bool:
        """True if the callback begins to train parameters during the fit. `checkpoint_trainable_only` then contradicts it."""
        return False

    @property
    def context(self) -> FitContext:
        """The objects that a hook may use, the same during a whole fit.

        Raises:
            ConfigError: no `fit` runs.
        """
        if self.__context is None:
            raise ConfigError(
                f"{type(self).__name__}.context is only available while fit() runs: use it in a hook, such as on_train_start"
            )
        return self.__context

    @context.setter
    def context(self, value: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__} sets self.context, through which hooks reach the model and run_dir: give the attribute another name"
        )

    def _bind(self, context: FitContext | None) -> FitContext | None:
        """Set the context, and return the previous one."""
        before, self.__context = self.__context, context
        return before

    def on_train_start(self, state: TrainState) -> None:
        """Run before the first step of this attempt.

        Args:
            state: the state of training, after a checkpoint was loaded.
        """

    def on_epoch_start(self, state: TrainState) -> None:
        """Run before the first update of each epoch, and before the first update of a run that resumes inside an epoch.

        Args:
            state: the state of training.
        """

    def on_before_update(self, state: TrainState) -> None:
        """Run before each update. The gradients of all ranks are averaged and unscaled, and not yet clipped.

        `context.model` has them in the attribute `grad` of its parameters. A parameter whose `grad` is set to None is left out of
        the update. With `fsdp`, each rank holds a shard of each gradient.

        Args:
            state: the state of training. `state.step` is the number of updates before this one.
        """

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        """Run after each update.

        Args:
            state: the state of training after the update.
            result: what the step has measured on this rank, as scalars on the device. Reading one waits for the device.
        """

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        """Run every `log_every_n_steps` updates, and after each validation.

        Args:
            state: the state of training.
            split: "train" for values of training, "val" for those of a validation.
            metrics: name -> value, over all ranks.
        """

    def on_times(self, state: TrainState, seconds: Mapping[str, float]) -> None:
        """Run after each `on_log` of split "train".

        Args:
            state: the state of training.
            seconds: the time that each part of an update took (see `TimeSplit.take`).
        """

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Run after each epoch and its validation.

        Args:
            state: the state of training.
            metrics: the row of the epoch: means over training, and validation metrics with the prefix `val_`. The latter are
                missing if `validate_every_n_steps` or `validate_every_s` is set, because validations then do not follow the epochs.
        """

    def on_validation_start(self, state: TrainState) -> None:
        """Run before each validation: after an epoch, or when `validate_every_n_steps` or `validate_every_s` says so.

        Args:
            state: the state of training.
        """

    def on_validation_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        """Run after each validation, and before `on_epoch_end` if the epoch ends there.

        No checkpoint is saved between `on_validation_start` and `on_validation_end`.

        Args:
            state: the state of training.
            metrics: the row of the validation: means over the training of the epoch so far, and the metrics of each validation
                set with its prefix (`val_`, or `val_NAME_` for a set with a name). Empty if a signal ended the validation early.
        """

    def on_checkpoint(self, state: TrainState, path: Path) -> None:
        """Run after a checkpoint was saved.

        With `checkpoint_async`, that is at a later step than the one that was saved.

        Args:
            state: the state of training that was saved.
            path: the directory of the checkpoint.
        """

    def on_train_end(self, state: TrainState) -> None:
        """Run after the last step and its checkpoint. `context.stop` has no effect here and logs a warning.

        Args:
            state: the state of training at its end.
        """

    def on_error(self, state: TrainState, error: BaseException) -> None:
        """Run when training ends with an error. Other ranks may be gone, so call no collective.

        Args:
            state: the state of training after the last update.
            error: what ended training.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in the checkpoint. Called on every rank; the main process's is stored.

        Returns:
            Plain values, containers of them, NumPy arrays and torch tensors, by name.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Called on every rank.

        Args:
            state: what `state_dict` returned on the main process, with tensors on the CPU.
        """
