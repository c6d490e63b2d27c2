"""What passes between the parts: where training stands, what a step gave, what a fit returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


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


@dataclasses.dataclass(repr=False)
class History:
    """What `fit` returns: one row per epoch (also of the one that `max_steps` cut off) and what was best."""

    rows: list[dict[str, float]]
    best_metrics: dict[str, float]
    total_time: float  # seconds, of all attempts
    steps: int = 0
    run_dir: str | None = None
    stop_reason: str | None = None

    def __repr__(self) -> str:
        epochs, best = len(self.rows), {n: v for n, v in self.best_metrics.items() if n.startswith("val_")}
        parts = [
            f"{epochs} epoch{'s' * (epochs != 1)}", f"{self.steps} step{'s' * (self.steps != 1)}", f"in {self.total_time:.1f} s",
            *(f"best {name} {value:.4g}" for name, value in list((best or self.best_metrics).items())[:2]),
        ]  # fmt: skip
        named = {"stop_reason": self.stop_reason, "run_dir": self.run_dir}
        parts += [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"History({', '.join(parts)})"

    @property
    def best_accuracy(self) -> float:
        """The best `val_accuracy`, or training `accuracy` where nothing was validated; NaN without either."""
        return self.best_metrics.get("val_accuracy", self.best_metrics.get("accuracy", float("nan")))

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a data frame, one per epoch. Needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self, path: str | None = None) -> Any:
        """Loss and metric curves over the epochs as a matplotlib figure, saved to `path` when given. Needs matplotlib."""
        from distributed.report.plotting import plot_history

        return plot_history(self, path)
