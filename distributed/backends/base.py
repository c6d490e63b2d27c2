"""The adapter protocol: what a backend must do. Every rank calls every verb, in the same order."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from distributed.plan import BatchPlan, ProcessPlan
from distributed.settings import MergedConfig
from distributed.state import Group, MicroBatch, StepResult, WorkerContext

OptionsT = TypeVar("OptionsT")
Key = TypeVar("Key")


@dataclasses.dataclass
class Job:
    """What the user wants trained: the arguments of `Trainer`."""

    model: Any  # a module, or a factory () -> module
    optimizer: Any = None  # an optimizer, a factory (params) -> optimizer, or None: AdamW at learning_rate
    scheduler: Any = None  # a schedule, a factory (optimizer) -> schedule, or None
    loss_fn: Callable[..., Any] | None = None
    training_step: Callable[..., Any] | None = None
    metrics: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)


class ShardedData(abc.ABC):
    """One rank's part of a data set, in an order that is a pure function of (seed, epoch, position)."""

    num_samples: int | None  # global samples an epoch; None for a stream of unknown length
    batch: BatchPlan

    @property
    def updates_per_epoch(self) -> int | None:
        """Groups an epoch yields; None where the length is unknown."""
        if self.num_samples is None:
            return None
        return -(-self.num_samples // self.batch.global_batch_size)

    @abc.abstractmethod
    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Group]:
        """The groups of epoch `epoch` after its first `skip` global samples. The same number on every rank."""

    def close(self) -> None:
        """Stop loader processes."""


class Backend(abc.ABC, Generic[OptionsT]):
    """One engine. `distributed.testing` holds one without a framework, for tests of what stands on the adapters."""

    Options: ClassVar[type[Any]]  # frozen dataclass of the settings only this backend has, checked by the config

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        """Cheap; refuses what it cannot honour. Called in the parent too, before any process starts."""
        self.merged, self.config, self.options, self.plan = merged, merged.config, options, plan
        self.model: Any = None  # the user's module, once it is prepared
        self.report: Callable[[dict[str, Any]], None] = lambda event: None  # notices and warnings, to the display

    @abc.abstractmethod
    def setup(self) -> WorkerContext:
        """Join the group, pick the device, seed. Called by Trainer, once per worker."""

    @abc.abstractmethod
    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        """Build model, then optimizer, then schedule. Returns notices to show once (defaults chosen, rates scaled)."""

    @abc.abstractmethod
    def batch_size_of(self, data: Any) -> int | None:
        """The batch size that a loader was given, where it counts as set; None for a data set. Also before `setup`."""

    @abc.abstractmethod
    def take_weights(self, model: Any, directory: Path) -> Any:
        """The user's `model` (built, if it is a factory) with the weights of a checkpoint, in a process that trained nothing."""

    @abc.abstractmethod
    def shard(self, data: Any, batch: BatchPlan, train: bool) -> ShardedData:
        """This rank's batches of `data`."""

    @abc.abstractmethod
    def train_step(self, group: Group) -> StepResult:
        """Forward and backward on all micro-batches, then ONE update. No host sync but the NaN check before the update."""

    @abc.abstractmethod
    def eval_step(self, micro: MicroBatch) -> StepResult:
        """Forward in eval mode without gradients."""

    @abc.abstractmethod
    def predict_step(self, micro: MicroBatch) -> Any:
        """The model's outputs for one micro-batch, on the host, as `join_outputs` takes them; eval mode."""

    @abc.abstractmethod
    def collect(self, results: Sequence[StepResult]) -> dict[str, tuple[float, float]]:
        """name -> (sum, count) over all ranks and all `results`, as floats. A collective; the only host sync of training."""

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        """Within it the global random generators are the training's own; the caller's are put back after it."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def gradient_norm(self) -> float | None:
        """Global norm of the newest update's gradient, before clipping; None where there is none. All ranks."""

    @abc.abstractmethod
    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        """Sums over all ranks. A collective; how ranks agree."""

    @abc.abstractmethod
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Rank `src`'s JSON-able `value` on every rank. A collective."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of ranks. A collective."""

    @abc.abstractmethod
    def key_value_store(self) -> Any:
        """A store shared by all ranks with `set`, `get`, `check` and `compare_set`, or None in a world of one."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abc.abstractmethod
    def learning_rates(self) -> list[float]:
        """The rate of each parameter group for the next update."""

    @abc.abstractmethod
    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Step a schedule that counts epochs (`scheduler_interval='epoch'`, or one that watches a metric)."""

    @abc.abstractmethod
    def save(self, directory: Path) -> dict[str, Any]:
        """Write my tensors into the staged checkpoint `directory`; return the JSON-able rest (rank 0's is kept)."""

    @abc.abstractmethod
    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Take up what `save` wrote, at any world size. `state` is what `save` returned on rank 0."""

    @abc.abstractmethod
    def export(self, path: Path) -> None:
        """The model's weights by name in one safetensors file; all ranks call it, the main process writes."""

    @abc.abstractmethod
    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        """`predict`'s answer out of every rank's (number of the group, rank, outputs), in the order of the samples."""

    @abc.abstractmethod
    def unwrap(self) -> None:
        """Drop what was put around the model for training, so that the process can end in order."""

    @abc.abstractmethod
    def rewrap(self) -> None:
        """Put it around the model again, for a further `fit`."""

    @abc.abstractmethod
    def teardown(self) -> None:
        """Orderly end, always called; releases the group and leaves no thread. After a failure it must not wait for others."""
