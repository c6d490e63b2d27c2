"""An engine of one file: least squares with numpy, in one process. Its registry entry is in `toy_entry`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy
from safetensors.numpy import save_file

from distributed.backends.base import Backend, ShardedData
from distributed.backends.sums import added
from distributed.backends.world import OneProcess
from distributed.checkpoints.durable import write_file
from distributed.config.plan import BatchPlan
from distributed.data import epoch_order, slices
from distributed.errors import ConfigError, TrainingError
from distributed.state import DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch, WorkerContext


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

    def epoch(self, epoch: int, skip: int = 0) -> Iterator[UpdateBatch]:
        order = epoch_order(self.num_samples, self._seed, epoch, self._shuffle, self.version)
        for start in range(skip, self.num_samples, self.batch.global_batch_size):
            chosen = order[start : start + self.batch.global_batch_size]
            parts = [chosen[list(part)] for part in slices(len(chosen), self.batch, 0)]
            micros = [MicroBatch((self._inputs[part], self._targets[part]), len(part)) for part in parts]
            yield UpdateBatch(micros, len(chosen), start)


class ToyBackend(Backend[ToyOptions]):
    """Gradient descent on the squared error of a `Line`."""

    Options: ClassVar[type[Any]] = ToyOptions
    refuses: ClassVar[Mapping[str, Any]] = {
        "mixed_precision": "numpy on CPUs has no use for it: drop it",
        **dict.fromkeys(
            ("gradient_clipping", "compile", "activation_checkpointing", "checkpoint_trainable_only"),
            "least squares has no use for it: drop it",
        ),
        "nan_policy": "this engine stops: drop it",
        "init_from": "this engine begins at zero: drop it",
        "data.presharded": "there is one process: drop it",
        "data.remove_unused_columns": "it reads arrays: drop it",
    }
    _step = 0  # updates that were made

    def check(self, job: Job, *, here: bool) -> None:
        for name in ("optimizer", "scheduler", "loss_fn", "training_step", "metrics"):
            if getattr(job, name):
                raise ConfigError(f"{name} does not work with backend='toy', which does least squares: drop it")

    def setup(self) -> WorkerContext:
        self.world = OneProcess(WorkerContext(0, 1, 0, 1, 0, "cpu"))
        self.context = self.world.context
        return self.context

    def batch_size_of(self, data: Any) -> int | None:
        return None

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        if not (isinstance(data, tuple) and len(data) == 2):
            raise ConfigError(f"{role.value} is a {type(data).__name__}: pass a tuple of inputs and targets")
        return ToyData(data, batch, self.config.seed, role.is_training and self.config.shuffle is not False)

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        self.model = job.model if isinstance(job.model, Line) else job.model()  # the model, or a factory
        return []

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        def finish() -> None:
            self.model.weights, self._step = _read(directory), int(state["step"])

        return finish

    def _error(self, micro: MicroBatch) -> Any:
        inputs, targets = micro.batch
        return self.model(inputs) - targets

    def _result(self, micros: Sequence[MicroBatch]) -> StepResult:
        rows = [("loss", float((self._error(each) ** 2).sum()), 1.0, each.num_samples) for each in micros]
        return StepResult(rows, sum(each.num_samples for each in micros))

    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        result = self._result(update_batch.micro_batches)
        if not all(math.isfinite(value) for _, value, _, _ in result.averages):
            raise TrainingError(f"update {self._step + 1}: the loss is not finite: lower learning_rate")
        gradient = sum(each.batch[0].T @ self._error(each) for each in update_batch.micro_batches)
        self.model.weights -= self.learning_rates()[0] * 2 * gradient / update_batch.num_samples
        self._step += 1
        return result

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        rows = [numpy.array([(v, n) for _, v, _, n in each.averages]).sum(0) for each in results]
        return added(self.world.gather({"loss": numpy.array(rows)}))

    def learning_rates(self) -> list[float]:
        return [self.config.warm_rate(self.config.learning_rate, self._step)]

    def eval_step(self, micro: MicroBatch) -> StepResult:
        return self._result([micro])

    def step_schedule(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        """No schedule."""

    def save(self, directory: Path) -> dict[str, Any]:
        (directory / "model").mkdir(parents=True, exist_ok=True)
        content = json.dumps(self.model.weights.tolist()).encode()
        write_file(directory / "model" / "weights.json", [content], len(content))
        return {"step": self._step}

    def unwrap(self) -> None:
        """Nothing is around the model."""

    def rewrap(self) -> None:
        """Nothing is around the model."""

    def predict_step(self, micro: MicroBatch) -> Any:
        return self.model(micro.batch[0])

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        return numpy.concatenate([outputs for part in parts for _, _, outputs in part])

    def export(self, path: Path) -> None:
        save_file({"weights": self.model.weights}, path)

    def take_weights(self, model: Any, directory: Path) -> Any:
        model.weights = _read(directory)
        return model

    def teardown(self) -> None:
        """One process leaves nobody."""


def _read(directory: Path) -> Any:
    return numpy.array(json.loads((directory / "model" / "weights.json").read_text()))
