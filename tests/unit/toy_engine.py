"""An engine of one file: least squares with numpy, in one process. Its registry row is in `test_new_engine`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy

from distributed.backends.base import Backend, ShardedData
from distributed.backends.sums import added
from distributed.backends.world import OneProcess
from distributed.checkpoints.durable import write_file
from distributed.config.plan import BatchPlan
from distributed.data import epoch_order, slices
from distributed.state import DataRole, Group, Job, MicroBatch, StepResult, Sums, WorkerContext


@dataclasses.dataclass(frozen=True)
class ToyOptions:
    """No options."""


class Line:
    """A model: `weights` [inputs]."""

    def __init__(self, size: int) -> None:
        self.weights = numpy.zeros(size)

    def __call__(self, inputs: Any) -> Any:
        return inputs @ self.weights


class ToyData(ShardedData):
    """Rows of (inputs, targets)."""

    def __init__(self, data: Any, batch: BatchPlan, seed: int, shuffle: bool) -> None:
        (self._inputs, self._targets), self.batch, self._seed, self._shuffle = data, batch, seed, shuffle
        self.num_samples: int = len(self._targets)

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[Group]:
        order = epoch_order(self.num_samples, self._seed, epoch, self._shuffle)
        for start in range(skip, self.num_samples, self.batch.global_batch_size):
            chosen = order[start : start + self.batch.global_batch_size]
            parts = [chosen[list(part)] for part in slices(len(chosen), self.batch, 0)]
            micros = [MicroBatch((self._inputs[part], self._targets[part]), len(part)) for part in parts]
            yield Group(micros, len(chosen), start)


class ToyBackend(Backend[ToyOptions]):
    """Gradient descent on the squared error of a `Line`."""

    Options: ClassVar[type[Any]] = ToyOptions
    refuses: ClassVar[Mapping[str, Any]] = {"mixed_precision": "numpy on CPUs has no use for it: drop it"}

    def setup(self) -> WorkerContext:
        self.world = OneProcess(WorkerContext(0, 1, 0, 1, 0, "cpu"))
        self.context = self.world.context
        return self.context

    def batch_size_of(self, data: Any) -> int | None:
        return None

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        return ToyData(data, batch, self.config.seed, role.is_training)

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        self.model = job.model
        return []

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        self.model.weights = _read(directory)

    def _error(self, micro: MicroBatch) -> Any:
        inputs, targets = micro.batch
        return self.model(inputs) - targets

    def _result(self, micros: Sequence[MicroBatch]) -> StepResult:
        rows = [("loss", float((self._error(each) ** 2).sum()), 1.0, each.num_samples) for each in micros]
        return StepResult(rows, sum(each.num_samples for each in micros))

    def train_step(self, group: Group) -> StepResult:
        result = self._result(group.micro_batches)
        gradient = sum(each.batch[0].T @ self._error(each) for each in group.micro_batches)
        self.model.weights -= self.config.learning_rate * 2 * gradient / group.num_samples
        return result

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        rows = [numpy.array([(v, n) for _, v, _, n in each.averages]).sum(0) for each in results]
        return added(self.world.gather({"loss": numpy.array(rows)}))

    def learning_rates(self) -> list[float]:
        return [self.config.learning_rate]

    def eval_step(self, micro: MicroBatch) -> StepResult:
        return self._result([micro])

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """No schedule."""

    def save(self, directory: Path) -> dict[str, Any]:
        (directory / "model").mkdir()
        content = json.dumps(self.model.weights.tolist()).encode()
        write_file(directory / "model" / "weights.json", [content], len(content))
        return {}

    def unwrap(self) -> None:
        """Nothing is around the model."""

    def rewrap(self) -> None:
        """Nothing is around the model."""

    def predict_step(self, micro: MicroBatch) -> Any:
        return self.model(micro.batch[0])

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        return numpy.concatenate([outputs for part in parts for _, _, outputs in part])

    def export(self, path: Path) -> None:
        path.write_text(json.dumps(self.model.weights.tolist()))

    def take_weights(self, model: Any, directory: Path) -> Any:
        model.weights = _read(directory)
        return model

    def teardown(self) -> None:
        """One process leaves nobody."""


def _read(directory: Path) -> Any:
    return numpy.array(json.loads((directory / "model" / "weights.json").read_text()))
