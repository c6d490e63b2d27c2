"""Data that the parts of a fit pass to each other, without behaviour; what is written to disk belongs in `checkpoints` and `runs`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

Sums = list[tuple[float, float]]  # (sum, count) of several steps, in their order
# Suffixes of the names of sums for values that are not averaged: SUM is added up, and MAX keeps the largest value.
# The separator is a control character, which no name of a metric has.
SEPARATOR = "\x1f"
SUM, MAX = f"{SEPARATOR}sum", f"{SEPARATOR}max"
RATE = f"{SEPARATOR}rate"  # it is added up and divided by the seconds of training
# The newest version of the order of the samples and of their random numbers. A run keeps its version, see `TrainState.data_version`.
DATA_VERSION = 3
# The metrics of a finished epoch by name, with its `epoch` and `step`: a row of `History`.
EpochMetrics = Mapping[str, Any]
# A function that sends an event of a run to the display, such as {"kind": "warning", "text": ...}.
OnEvent = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass
class Job:
    """The arguments of `Trainer` that say what to train.

    With several models, `names` has the name of each, `model` is a mapping of modules or factories, `optimizer` is a dict
    with an entry for each model that is trained, and `scheduler` is a dict.
    """

    model: Any  # a module, or a factory () -> module
    optimizer: Any = None  # an optimizer, a factory (params) -> optimizer, or None: AdamW at learning_rate
    scheduler: Any = None  # a schedule, a factory (optimizer) -> schedule, or None
    loss_fn: Callable[..., Any] | str | None = None  # a name of the library of the model, until the model is built
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()  # the names of several models, or () for one model
    collate_fn: Callable[[Any], Any] | None = None  # samples -> a batch, or None: as the loader or the data set says
    processing_class: Any = None  # the tokenizer or the processor of the data, or None
    predict_with_generate: bool = False  # whether metrics get what model.generate() returns
    generation_config: Any = None  # its configuration, or None for that of the model
    is_own_loop: bool = False  # whether the script runs the loop and computes the losses, see `training.own_loop`
    # Where the first weights come from (see `checkpoints.weights`), or None for those of `model`.
    init_from: str | None = None

    def of_model(self, name: str) -> Job:
        """Return the job of one of several models."""
        return dataclasses.replace(
            self, model=self.model[name], optimizer=self.optimizer[name], scheduler=self.scheduler.get(name), names=()
        )


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Ranks and device of this process. The names are those of torch."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str  # "cpu", "cuda:0", ...

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0


class DataRole(enum.Enum):
    """The purpose of a data set. The value is the argument that it was passed as, for error messages."""

    TRAINING = "train_data"
    VALIDATION = "val_data"
    EVALUATION = "evaluate(data)"
    PREDICTION = "predict(data)"

    @property
    def is_training(self) -> bool:
        return self is DataRole.TRAINING


@dataclasses.dataclass(slots=True)
class MicroBatch:
    """One forward and backward pass of one rank: a batch from the user's loader and its number of samples."""

    batch: Any
    num_samples: int  # 0 if the rank's slice is empty: a sample is then run again with weight 0


@dataclasses.dataclass(slots=True)
class UpdateBatch:
    """The update batch of one rank: all its micro-batches for one optimizer update."""

    micro_batches: list[MicroBatch]
    num_samples: int  # samples of the update, over all ranks
    position: int  # the position of the update's first sample in the order of the epoch
    # (position, num_samples) -> the keys of this rank's samples in the data set, for each micro-batch; None if they are not known.
    keys_at: Callable[[int, int], list[list[Any]]] | None = None


@dataclasses.dataclass(slots=True)
class StepResult:
    """Result of one step on one rank. Values may stay on the device, so that a step does not wait for the device.

    Attributes:
        averages: tuples (name, value, scale, count). `value * scale` is the sum over this rank's samples, and `count`
            is its divisor. `value` and `count` may be device scalars.
        num_samples: the samples of the step, over all ranks.
        deferred: values of the backend that `Backend.collect` reads.
        skipped: whether the update was skipped, because of `nan_policy="skip"` or an fp16 overflow.
    """

    averages: list[tuple[str, Any, float, Any]]
    num_samples: int = 0
    deferred: Any = None
    skipped: bool = False


@dataclasses.dataclass(frozen=True)
class LoggedMedia:
    """An image, a text or the like that was logged.

    Attributes:
        name: the name under which it was logged.
        kind: "image", "text", "table", "audio" or "figure".
        step: the number of updates when it was logged.
        rank: the rank that logged it, or None if only the main process logs this name.
        path: the path of its file, relative to the run directory.
        content: the bytes of the file: PNG, UTF-8 text, CSV or WAV.
    """

    name: str
    kind: str
    step: int
    rank: int | None
    path: str
    content: bytes

    @property
    def full_name(self) -> str:
        """The name, with the rank if each rank logs its own."""
        return self.name if self.rank is None else f"{self.name}/rank_{self.rank}"


@dataclasses.dataclass(slots=True)
class TrainState:
    """The state of training that all ranks share, as checkpoints store it. All values are JSON-able.

    Attributes:
        step: the number of optimizer updates done.
        epoch: the number of epochs finished.
        samples_in_epoch: the number of global samples of the current epoch that were used.
        samples_seen: the number of global samples that were used.
        cursor: the position of a data stream in the epoch, see `ShardedData.cursor`. None for other data.
        data_version: the version of the order of the samples, see `data.epoch_order`, and of the random numbers that they draw. It
            stays the same for a run, whichever version of the package continues it.
        stop_reason: why training ended early, such as "max_steps", "early_stopping" or "signal 15".
        metrics: the latest value of every metric.
        best: the best value of every metric.
        rows: one row per epoch with its validation, or one per validation if `validate_every_n_steps` or
            `validate_every_s` is set.
        train_time_s: seconds in steps, over all attempts.
        total_time: seconds in `fit`, over all attempts.
    """

    step: int = 0
    epoch: int = 0
    samples_in_epoch: int = 0
    samples_seen: int = 0
    cursor: dict[str, Any] | None = None
    data_version: int = DATA_VERSION
    stop_reason: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)
    # Whether the newest row exists only because training ended there. The next row replaces it.
    is_last_row_open: bool = False
    epoch_sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # name -> [sum, count] over this epoch
    # Metrics over all samples of this epoch, as of the newest log line.
    over_all: dict[str, float] = dataclasses.field(default_factory=dict)
    # Name -> [sum, count] since the last log line.
    log_sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    train_time_s: float = 0.0
    total_time: float = 0.0
    fit_starts: list[list[int]] = dataclasses.field(default_factory=list)  # [epoch, step] at which each fit call began
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def epoch_in_words(self) -> int:
        """The epoch of the newest update as rows and the progress bar show it: from 1, or 0 before the first update."""
        return self.epoch + (self.samples_in_epoch > 0)

    @property
    def has_row(self) -> bool:
        """Return whether the newest row belongs to this step and will not be replaced."""
        return bool(self.rows) and self.rows[-1]["step"] == self.step and not self.is_last_row_open
