"""What passes between the parts of a fit: what is trained, where training stands, what a step gave. No behaviour."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

Sums = list[tuple[float, float]]  # (sum, count) of several steps, in their order


@dataclasses.dataclass
class Job:
    """What the user wants trained: the arguments of `Trainer`."""

    model: Any  # a module, or a factory () -> module
    optimizer: Any = None  # an optimizer, a factory (params) -> optimizer, or None: AdamW at learning_rate
    scheduler: Any = None  # a schedule, a factory (optimizer) -> schedule, or None
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """This process among the workers, in torch's words."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    device: str  # "cpu", "cuda:0", ...
    restart_count: int = 0

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0


class DataRole(enum.Enum):
    """What a user's data is for. The value is the argument under which it was given, for messages."""

    TRAINING = "train_data"
    VALIDATION = "val_data"
    EVALUATION = "evaluate(data)"
    PREDICTION = "predict(data)"

    @property
    def is_training(self) -> bool:
        return self is DataRole.TRAINING


@dataclasses.dataclass(slots=True)
class MicroBatch:
    """One forward and backward of one rank: a batch as the user's loader gives it, and how many samples count."""

    batch: Any
    num_samples: int  # 0: the rank's slice is empty, a sample is run again with weight 0


@dataclasses.dataclass(slots=True)
class Group:
    """All micro-batches of one rank for one optimizer update."""

    micro_batches: list[MicroBatch]
    num_samples: int  # over all ranks
    position: int  # of the update's first sample in the epoch's order


@dataclasses.dataclass(slots=True)
class StepResult:
    """What one step of one rank gave; device scalars, no host sync.

    `averages` holds (name, value, scale, count): `value * scale` is the sum over this rank's samples and `count` what it is
    divided by; value and count may be device scalars. `deferred` is the backend's own, settled in `Backend.collect`.
    """

    averages: list[tuple[str, Any, float, Any]]
    num_samples: int = 0  # over all ranks
    deferred: Any = None
    skipped: bool = False  # the update was left out (nan_policy skip, or an fp16 overflow)


@dataclasses.dataclass(slots=True)
class TrainState:
    """Where training stands. The part of a checkpoint that every rank shares; JSON-able."""

    step: int = 0  # optimizer updates done
    epoch: int = 0  # epochs finished
    samples_in_epoch: int = 0  # global samples of the current epoch already used: the data cursor
    samples_seen: int = 0
    stop_reason: str | None = None  # why training ended early: "max_steps", "early_stopping", "signal 15", ...
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # the latest of every name
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, float]] = dataclasses.field(
        default_factory=list
    )  # one per finished epoch, and one of the epoch that `max_steps` cut off until that is finished
    epoch_sums: dict[str, list[float]] = dataclasses.field(
        default_factory=dict
    )  # name -> [sum, count] of the running epoch
    over_all: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # metrics over all samples of the running epoch, as of its newest log line
    log_sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # the same since the last log line
    train_time_s: float = 0.0  # spent in steps, of all attempts
    total_time: float = 0.0  # seconds in fit, of all attempts
    fit_starts: list[list[int]] = dataclasses.field(default_factory=list)  # [epoch, step] at which each fit call began
    callbacks: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def epoch_in_words(self) -> int:
        """The epoch of the newest update as people count them, and as rows and the progress bar do: from 1; 0 before it."""
        return self.epoch + (self.samples_in_epoch > 0)

    def to_json(self) -> dict[str, Any]:
        """Plain Python, for state.json."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TrainState:
        """The state that `to_json` wrote; unknown names of a newer version are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})
