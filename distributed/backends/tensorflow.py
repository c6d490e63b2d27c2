"""Train Keras 3 models with TensorFlow over MirroredStrategy or MultiWorkerMirroredStrategy, with our own step.

Workaround (Keras 3.15, keras-team/keras#20585; may go when `model.fit` works under MultiWorkerMirroredStrategy): it
fails there, so we run our own graphs with the strategy's collectives. TensorFlow is loaded in `setup()`, so that this
file imports without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._keras.by_name import check_names
from distributed.backends._tensorflow import start
from distributed.backends._tensorflow.observer import TensorFlowObserver
from distributed.backends._tensorflow.refusals import IN_GRAPH, REFUSES
from distributed.backends._tensorflow.scripts import refuse_reading, refuse_torch
from distributed.backends.base import Backend, Refusals, ShardedData
from distributed.backends.keras_kinds import is_model
from distributed.backends.non_finite import NanPolicy, describe, votes_of
from distributed.config.fields import setting
from distributed.config.gpus import visible_gpus
from distributed.config.merging import MergedConfig
from distributed.config.optimization import RateCurve
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import worker_environment
from distributed.state import DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch, WorkerContext

if TYPE_CHECKING:
    from distributed.backends._tensorflow.results import Results
    from distributed.backends._tensorflow.sources import Data
    from distributed.backends._tensorflow.step import PendingUpdate
    from distributed.backends._tensorflow.world import TensorFlowWorld
    from distributed.backends.measured import Measured

_REFUSED = {
    "parameter_server": "parameter servers update asynchronously, so that no two runs would give the same numbers",
    "tpu": "TPUs have a launcher and checkpoints of their own",
}


@dataclasses.dataclass(frozen=True)
class TensorFlowOptions:
    """Settings of tf.distribute."""

    strategy: str = setting(
        "multi_worker_mirrored",
        "multi_worker_mirrored: one process per device; mirrored: one process on all its devices",
        choices=("multi_worker_mirrored", "mirrored", *_REFUSED),
    )
    num_devices: int | None = setting(
        None, "devices of one process under 'mirrored' (default: all GPUs; on CPUs 1)", int, minimum=1
    )


class TensorFlowBackend(Backend[Any]):
    """Run forward, backward, collectives, clipping, NaN check and update, and save tensors, for Keras models."""

    Options: ClassVar[type[Any]] = TensorFlowOptions
    refuses: ClassVar[Refusals] = REFUSES
    world: TensorFlowWorld
    observer: TensorFlowObserver
    measured: Measured

    def __init__(self, merged: MergedConfig, options: Any, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self._is_mirrored = False
        self._check_options()
        self._check_environment()
        self._step = 0  # number of updates made
        self._is_training = False
        self._train_data: Data | None = None
        self.observer = TensorFlowObserver(self)
        self._results: Results | None = None
        self._nan_policy = NanPolicy(self.config.nan_policy, lambda event: self.on_event(event))

    # ------------------------------------------------------------------ overridden if Horovod sends the tensors

    _words: ClassVar[str] = start.WORDS  # for messages
    _flags: ClassVar[str] = start.FLAGS

    def _check_options(self) -> None:
        strategy, number = self.options.strategy, self.options.num_devices
        if strategy in _REFUSED:
            raise ConfigError(
                f"tensorflow.strategy={strategy!r} is not supported, as {_REFUSED[strategy]}:"
                " drop it, which selects 'multi_worker_mirrored'"
            )
        self._is_mirrored = strategy == "mirrored"
        if not self._is_mirrored:
            if number is not None:
                raise ConfigError(
                    f"tensorflow.num_devices={number} is for one process with several devices: set"
                    " tensorflow.strategy='mirrored' too, or set nproc_per_node instead"
                )
            return
        if self.plan.world_size > 1:
            raise ConfigError(
                f"tensorflow.strategy='mirrored' is one process on all its devices, but this run has {self.plan.world_size}:"
                " set nproc_per_node=1, or drop the strategy to get one process per device"
            )
        self.devices_per_process = number or (visible_gpus() if self.plan.device == "cuda" else 1)
        self.data_parallel_size = self.plan.data_parallel_size * self.devices_per_process

    def _check_environment(self) -> None:
        start.check_engine(self._words, self._flags)
        start.check_cluster()

    def _join(self, found: WorkerEnvironment | None) -> TensorFlowWorld:
        """Join the other processes and return the world. Called before TensorFlow is used. A collective."""
        is_alone = found is None or self.plan.world_size == 1
        joined = None if is_alone else start.join(found, self.config.start_timeout, self._warn)  # type: ignore[arg-type]
        start.import_quietly()
        if self.plan.device == "cuda":
            start.set_memory_growth(first_only=not self._is_mirrored)
        from distributed.backends._tensorflow.replicas import Replicas, mirrored
        from distributed.backends._tensorflow.world import TensorFlowWorld, cluster_collectives

        device = "cuda:0" if self.plan.device == "cuda" else "cpu"
        if found is None or joined is None:
            replicas = mirrored(self.plan.device, self.devices_per_process) if self._is_mirrored else Replicas()
            return TensorFlowWorld(WorkerContext(0, 1, 0, 1, 0, device), None, replicas=replicas)
        context = WorkerContext(
            found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank, device
        )
        return TensorFlowWorld(context, cluster_collectives(joined, self.config.timeout_s), joined.store)

    # ------------------------------------------------------------------ set-up

    def check(self, job: Job, *, here: bool) -> None:
        refuse_torch(job, self._words)
        refuse_reading(job, self._words)
        if is_model(job.model):
            check_names(job)

    def setup(self) -> WorkerContext:
        found = worker_environment()
        start.set_environment(found, self.plan.device)
        self.world = self._join(found)
        self.context = self.world.context
        import keras
        import tensorflow as tf

        from distributed.backends._tensorflow.generators import Generators

        self._generators = Generators(self.world.replicas, self.context.rank)
        if self.config.deterministic:
            keras.utils.set_random_seed(self.config.seed & 0xFFFFFFFF)
            tf.config.experimental.enable_op_determinism()
        return self.context

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        with self.world.replicas.scope():
            return self._prepare(job, batch)

    def _prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        from distributed.backends._keras.models import batch_dependent, check_model
        from distributed.backends._tensorflow import models, optim
        from distributed.backends._tensorflow.objective import TensorFlowObjective
        from distributed.backends._tensorflow.results import Results
        from distributed.backends._tensorflow.saving import Saved
        from distributed.backends._tensorflow.step import Step
        from distributed.backends.weights import start_from

        notices: list[str] = []
        self._original_model = job.model
        policy = models.policy_of(self.config, self.mixed_precision)
        replicas = self.world.replicas
        self.model = models.build_model(job.model, self.config, policy, replicas)
        check_names(job)
        before = self._results  # results of an evaluation before the first fit
        self._results = Results(job, self.world, self._generators.untouched, self._warn, self._notice)
        self.measured = self._results.measured
        if before is not None:
            self.measured.form = before.measured.form
        self.objective = TensorFlowObjective(
            self.model, job.loss_fn, job.training_step, job.metrics, self.measured, self._notice, self.config.dtype
        )
        source = job.model if hasattr(job.model, "compiled") else self.model  # a factory may return a compiled model
        optimizer = None
        if self._train_data is not None:
            models.build(self.model, self.cast(self._train_data.example()), self.objective.predict)
            check_model(self.model)
            models.check_model(self.model, self.data_parallel_size)
        if job.init_from is not None:
            timeout_s = self.config.timeout_s
            start_from(job.init_from, self.model, self.world, timeout_s, notice=notices.append, warn=self._warn)
        if self._train_data is not None or job.init_from is not None:
            self.world.copy_from_main([variable.value for variable in self.model.variables])
        if self._train_data is not None:
            given = job.optimizer, job.scheduler
            optimizer = optim.build_optimizer(*given, self.model, source, self.merged, notices.append)
            curve = job.scheduler if isinstance(job.scheduler, RateCurve) else None
            self._rates = optim.Rates(optimizer, self.merged, batch, notices.append, curve)
            self.has_schedule = self._rates.has_schedule
        self.optimizer = self.users_optimizer = optimizer
        rates = self._rates if optimizer is not None else None
        self._saved = Saved(self.model, optimizer, rates, self._generators, self.world, self.data_parallel_size)
        self.steps = Step(self.model, self.objective, self.world, self._updating, self.config.gradient_clipping)
        self._generators.model = self.model
        self._seed_generators()
        if self.mixed_precision != "no":
            notices.append(f"mixed precision {self.mixed_precision} on {self.plan.device}")
        if self._is_mirrored:
            number = replicas.number
            notices.append(f"MirroredStrategy: {number} device{'s' * (number > 1)} in one process")
        self.batch_dependent = batch_dependent(self.model)
        if split := self.batch_dependent:
            more = ", ..." if len(split) > 3 else ""
            notices.append(f"results depend on the split of a batch because of {', '.join(split[:3])}{more}")
        return notices

    def _updating(self) -> contextlib.AbstractContextManager[Any]:
        return self._rates.updating()

    def _seed_generators(self) -> None:
        self._generators.seed(self.config.seed, self._step)

    @contextlib.contextmanager
    def own_generators(self) -> Iterator[None]:
        from distributed.backends._keras.floats import floats_of
        from distributed.backends._tensorflow.exact import exact_constants

        constants = exact_constants() if self.config.dtype == "float64" else contextlib.nullcontext()
        with floats_of(self.config.dtype), constants, self._generators.inside():  # for losses, metrics and optimizers
            yield

    def batch_size_of(self, data: Any) -> int | None:
        from distributed.backends._tensorflow.sources import batch_size_of

        return batch_size_of(data)

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        from distributed.backends._tensorflow.replicas import Joint, joint_plan
        from distributed.backends._tensorflow.sources import shard

        own = joint_plan(batch, self.devices_per_process)
        found = shard(data, batch=own, context=self.context, config=self.config, role=role, reduce=self.world.reduce)
        if self.devices_per_process > 1:
            found = Joint(found, self.devices_per_process)
        if role.is_training:
            self._train_data = found
        return found

    # ------------------------------------------------------------------ the step

    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        self._is_training = True
        self.observer.see(update_batch.micro_batches[0])
        from distributed.backends.over_all import Deferred

        pending: PendingUpdate | None = None
        deferred = Deferred("train", [], {})
        assert self._results is not None
        last = update_batch.micro_batches[-1]
        for number, micro in enumerate(update_batch.micro_batches):
            batch = self.cast(micro.batch)
            with self.logged.refusing(IN_GRAPH):
                pending = self.steps.forward_backward(
                    batch, micro.num_samples, update_batch.num_samples, pending, micro is last
                )
            self._results.keep(deferred, pending.calls, (update_batch.position, number))
        assert pending is not None
        result = self._results.of_training(pending.sums, update_batch.num_samples, deferred)
        self.observer.norm = float(pending.norm)
        if not math.isfinite(self.observer.norm):
            self._on_non_finite(update_batch, pending, result)
        if not result.skipped:
            self._rates.before_update(self._step)
            self.steps.apply(pending.gradients)
        self.observer.see_gradients(pending.gradients[0])
        self._step += 1
        return result

    def _on_non_finite(self, update_batch: UpdateBatch, pending: PendingUpdate, result: StepResult) -> None:
        """Apply `nan_policy`. All ranks call it together, because the summed gradients are the same on each. A collective."""
        losses = [float(pending.sums["loss"][0])]
        votes = votes_of(self.world, losses)

        def description() -> str:
            return describe(self.world, self._step + 1, update_batch, votes, losses)

        self._nan_policy.apply(self._step, description, result, can_be_made=True)

    # ------------------------------------------------------------------ results and evaluation

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        assert self._results is not None
        return self._results.collect(results)

    def eval_step(self, micro: MicroBatch) -> StepResult:
        self._enter_evaluation()
        assert self._results is not None
        with self.logged.refusing(IN_GRAPH):
            sums, calls = self.steps.evaluate(self.cast(micro.batch), micro.num_samples)
        return self._results.of_evaluation(sums, micro.num_samples, calls)

    def predict_step(self, micro: MicroBatch) -> Any:
        self._enter_evaluation()
        return self.steps.predict(self.cast(micro.batch), micro.num_samples)

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        from distributed.backends._tensorflow.outputs import joined

        number = self.devices_per_process
        return joined(
            [
                [
                    (update, rank * number + i, each)
                    for update, rank, found in mine
                    for i, each in enumerate(found)
                    if each[1]
                ]
                for mine in parts
            ]
        )

    def _enter_evaluation(self) -> None:
        if self._is_training:
            self._is_training = False
            self._saved.sync_statistics()

    # ------------------------------------------------------------------ schedule, state, end

    def learning_rates(self) -> list[float]:
        return [self._rates.at(self._step)]

    def step_schedule(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        """Do nothing, because Keras's schedules count updates."""

    def save(self, directory: Path) -> dict[str, Any]:
        extra = self._saved.save(directory, self._step)
        return extra | {"means": self.measured.form, "over_all": self.measured.wholes.save(directory)}

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        def load() -> None:
            self._step = int(state["step"])
            self.measured.form = state.get("means") or {}
            self.measured.wholes.load(directory, state.get("over_all"))
            if not self._saved.load(directory, state, self._notice):
                self._seed_generators()

        return load

    def export(self, path: Path) -> None:
        self._saved.export(path)

    def take_weights(self, model: Any, directory: Path) -> Any:
        from distributed.backends._tensorflow import models

        return models.with_weights(model, directory, self.config, models.policy_of(self.config, self.mixed_precision))

    def unwrap(self) -> None:
        from distributed.backends._tensorflow.models import give_back

        give_back(self.model, self._original_model)

    def rewrap(self) -> None:
        """Do nothing, because the model is not wrapped."""

    def teardown(self) -> None:
        """Do nothing, because TensorFlow 2.21 cannot leave its cluster before the process ends."""

    # ------------------------------------------------------------------ small things

    def cast(self, batch: Any) -> Any:
        """Return `batch` with its floating arrays in the element type of the run. Keras casts arrays in the same
        way."""
        import numpy
        import tensorflow as tf

        dtype = numpy.dtype(self.config.dtype)

        def cast(leaf: Any) -> Any:
            value = numpy.asarray(leaf)
            return value.astype(dtype) if value.dtype.kind == "f" and value.dtype != dtype else value

        return tf.nest.map_structure(cast, batch)
