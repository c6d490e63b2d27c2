"""Backend without a framework, and its data, for tests of the code above the adapters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from distributed.backends.base import Backend, ShardedData
from distributed.backends.world import OneProcess
from distributed.checkpoints.durable import write_file
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.data import epoch_order, slices
from distributed.state import DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch, WorkerContext


@dataclasses.dataclass(frozen=True)
class FakeOptions:
    """Empty options."""


class FakeData(ShardedData):
    """Numbers 0, 1, 2, ... as samples, cut as every backend cuts them."""

    def __init__(self, num_samples: int, batch: BatchPlan, rank: int = 0, seed: int = 0, shuffle: bool = False) -> None:
        self.num_samples: int = min(num_samples, batch.max_samples or num_samples)
        self.batch, self._rank, self._seed, self._shuffle = batch, rank, seed, shuffle

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        order = epoch_order(self.num_samples, self._seed, epoch, self._shuffle, self.version)
        for start in range(skip, self.num_samples, self.batch.global_batch_size):
            chosen = order[start : start + self.batch.global_batch_size].tolist()
            micros = [
                MicroBatch([chosen[i] for i in part], len(part)) for part in slices(len(chosen), self.batch, self._rank)
            ]
            yield UpdateBatch(micros, len(chosen), start)


class FakeBackend(Backend[FakeOptions]):
    """Backend with one process and one weight. An update adds the sum of its samples. `calls` records the calls."""

    Options: ClassVar[type[Any]] = FakeOptions

    def __init__(self, merged: MergedConfig, options: FakeOptions, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.weight = 0.0
        self.calls: list[str] = []
        self.seen: list[float] = []

    def setup(self) -> WorkerContext:
        self.world = OneProcess(WorkerContext(0, 1, 0, 1, 0, "cpu"))
        self.context = self.world.context
        return self.context

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        self.calls.append("prepare")
        return []

    def batch_size_of(self, data: Any) -> int | None:
        return None

    def take_weights(self, model: Any, directory: Path) -> Any:
        return json.loads((directory / "model" / "weight.json").read_text())

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        return FakeData(len(data), batch)

    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        samples = [float(sample) for micro in update_batch.micro_batches for sample in micro.batch]
        self.seen += samples
        self.weight += sum(samples)
        return StepResult([("loss", sum(samples), 1.0, len(samples))], update_batch.num_samples)

    def eval_step(self, micro: MicroBatch) -> StepResult:
        return StepResult([("loss", sum(map(float, micro.batch)), 1.0, micro.num_samples)], micro.num_samples)

    def predict_step(self, micro: MicroBatch) -> Any:
        return [sample + self.weight for sample in micro.batch]

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        sums: dict[str, Sums] = {}
        for name, value, scale, count in (average for result in results for average in result.averages):
            sums.setdefault(name, []).append((value * scale, count))
        return sums

    def learning_rates(self) -> list[float]:
        return [self.config.learning_rate]

    def step_schedule(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        self.calls.append("step_schedule")

    def save(self, directory: Path) -> dict[str, Any]:
        self.calls.append("save")
        (directory / "model").mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.weight).encode()
        write_file(directory / "model" / "weight.json", [content], len(content))
        return {}

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        def load() -> None:
            self.calls.append("load")
            self.weight = json.loads((directory / "model" / "weight.json").read_text())

        return load

    def export(self, path: Path) -> None:
        path.write_text(json.dumps(self.weight))

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        return [item for part in parts for _, _, outputs in part for item in outputs]

    def unwrap(self) -> None:
        self.calls.append("unwrap")

    def rewrap(self) -> None:
        self.calls.append("rewrap")

    def teardown(self) -> None:
        self.calls.append("teardown")
