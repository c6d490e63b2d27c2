"""Data that passes between the parts of a fit: the job, the state of training, the result of a step. No behaviour."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

Sums = list[tuple[float, float]]  # (sum, count) of several steps, in their order


@dataclasses.dataclass
class Job:
    """What to train: the arguments of `Trainer`."""

    model: Any  # a module, or a factory () -> module
    optimizer: Any = None  # an optimizer, a factory (params) -> optimizer, or None: AdamW at learning_rate
    scheduler: Any = None  # a schedule, a factory (optimizer) -> schedule, or None
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


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
    position: int  # the update's first sample, as a position in the epoch's order


@dataclasses.dataclass(slots=True)
class StepResult:
    """Result of one step on one rank. Values may stay on the device, so that the step needs no host sync.

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


@dataclasses.dataclass(slots=True)
class TrainState:
    """The state of training that all ranks share, as checkpoints store it. All values are JSON-able."""

    step: int = 0  # optimizer updates done
    epoch: int = 0  # epochs finished
    samples_in_epoch: int = 0  # the data cursor: global samples of the current epoch already used
    samples_seen: int = 0
    stop_reason: str | None = None  # why training ended early: "max_steps", "early_stopping", "signal 15", ...
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # the latest value of every metric
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    # One row per finished epoch, and one for an epoch that `max_steps` cut off until it is finished.
    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)
    epoch_sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # name -> [sum, count] over this epoch
    # Metrics over all samples of this epoch, at its newest log line.
    over_all: dict[str, float] = dataclasses.field(default_factory=dict)
    log_sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # the same since the last log line
    train_time_s: float = 0.0  # seconds in steps, over all attempts
    total_time: float = 0.0  # seconds in fit, over all attempts
    fit_starts: list[list[int]] = dataclasses.field(default_factory=list)  # [epoch, step] at which each fit call began
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def epoch_in_words(self) -> int:
        """The epoch of the newest update as rows and the progress bar show it: from 1, or 0 before the first update."""
        return self.epoch + (self.samples_in_epoch > 0)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain Python, for state.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TrainState:
        """Return the state that `to_json` wrote. Unknown names, written by a newer version, are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})
