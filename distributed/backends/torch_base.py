"""Run the torch step, which all torch engines share. An engine has a `Wrapper` of its own and overrides little else.

torch is loaded in `setup()`, so that this file imports without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._torch.named_losses import check_names_early
from distributed.backends._torch.observer import TorchObserver
from distributed.backends._torch.wrapper import Wrapper
from distributed.backends.base import Backend, If, OptionsT, Refusals, ShardedData
from distributed.backends.keras_kinds import is_model
from distributed.config.data import DataOptions
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.data import sample_seed
from distributed.errors import ConfigError
from distributed.state import DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch, WorkerContext

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.averaged_weights import AveragedTensors
    from distributed.backends._torch.averages import Averages
    from distributed.backends._torch.collating import Batching
    from distributed.backends._torch.frozen import FrozenPart
    from distributed.backends._torch.generating import Generation
    from distributed.backends._torch.loading import Beginning
    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.passes import Passes
    from distributed.backends._torch.several_update import SeveralUpdate
    from distributed.backends._torch.update import Update
    from distributed.backends._torch.world import TorchWorld
    from distributed.backends.measured import Measured

# Refusals of every engine that communicates through a torch process group.
PROCESS_GROUPS: Refusals = {
    "communication_backend=mpi": "it is not in PyTorch's wheels: use gloo, or backend='horovod' under mpirun",
    "communication_backend=nccl": (
        If("on CPUs", lambda own: own.plan.device == "cpu", "set communication_backend='gloo'"),
    ),
}


# For engines that split parameters over the ranks. torch's Adafactor (2.13) fails on them, and its Muon computes other numbers.
OF_WHOLE_MATRICES: Refusals = {
    "optimizer=adafactor": "it needs whole matrices, and each process has a shard: set optimizer='adamw', or use backend 'pytorch-ddp'",
    "optimizer=muon": "it needs whole matrices, and each process has a shard: set optimizer='adamw', or use backend 'pytorch-ddp'",
}


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a backend without settings of its own."""


class TorchBackend(Backend[OptionsT]):
    """Run forward, backward, clipping, NaN check, update, schedule and metrics, and save tensors, for torch modules.

    `wrapper` holds what differs between engines, `passes` runs forward and backward, and `update` makes the update.
    """

    Options: ClassVar[type[Any]] = NoOptions
    refuses: ClassVar[Refusals] = PROCESS_GROUPS
    refuses_callbacks: ClassVar[Refusals] = {}
    refuses_own_loop: ClassVar[str] = ""
    refuses_keras: ClassVar[str] = ""  # why Keras models do not work under this engine; empty if they do
    other_keras: ClassVar[str] = "choose another backend"  # advice for Keras models on another engine than torch
    averaged_weights: AveragedTensors
    world: TorchWorld
    observer: TorchObserver
    measured: Measured
    passes: Passes
    update: Update | SeveralUpdate
    _batching: Batching  # how samples become batches, set by `setup`

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.observer = TorchObserver(self)
        self.wrapper = Wrapper(self)
        self.wrapped: Any = None  # module to call in training, set by `prepare`
        self._averages: Averages | None = None
        self._generation: Generation | None = None  # set by `prepare` for `predict_with_generate`
        self._is_training: bool | None = None
        self._is_new_wrapper = False
        self._first_data: ShardedData | None = None
        self._trained_on: Beginning | None = None  # the stream of the newest fit, if it has a position
        self.frozen: FrozenPart | None = None  # with `checkpoint_trainable_only`: what checkpoints leave out

    # ------------------------------------------------------------------ set-up

    def check(self, job: Job, *, here: bool) -> None:
        self._check_model(job.model, here=here)
        check_names_early(job)

    def _check_model(self, model: Any, *, here: bool) -> None:
        if not is_model(model):
            return
        if self.config.checkpoint_trainable_only:
            raise ConfigError("checkpoint_trainable_only=True does not work with Keras models: drop it")
        if self.refuses_keras:
            raise ConfigError(f"backend={self.plan.backend!r} does not take Keras models: {self.refuses_keras}")
        from distributed.backends._keras.models import check_engine

        check_engine("torch", self.plan.backend, here=here, otherwise=self.other_keras)

    def setup(self) -> WorkerContext:
        import torch

        from distributed.backends._torch.collating import Batching
        from distributed.backends._torch.copying import TorchCopying
        from distributed.backends._torch.generators import OwnGenerators
        from distributed.backends._torch.recomputing import is_recomputing

        self.torch = torch
        self.world = self._join()
        self.context = self.world.context
        self.logged.is_repeated = is_recomputing
        self.device = torch.device(self.context.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.generators = OwnGenerators(self.device)
        self.copying = TorchCopying(self)
        options: DataOptions = self.config.options("data")
        self._batching = Batching.of(self.job, removes_columns=options.remove_unused_columns)
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        return self.context

    def _join(self) -> TorchWorld:
        """Join the other processes and return the world. A collective."""
        from distributed.backends._torch.world import ProcessGroup

        return ProcessGroup(self.plan, self.config, self._warn)

    def batch_size_of(self, data: Any) -> int | None:
        from distributed.backends._torch.loading import loader_batch_size

        return loader_batch_size(data)

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        from distributed.backends._torch.loading import beginning, shard

        sharded = shard(
            data, batch=batch, context=self.context, config=self.config, options=self.config.options("data"), role=role,
            reduce=self.world.reduce, batching=self._batching, trained_on=self._trained_on,
        )  # fmt: skip
        if role.is_training:
            self._trained_on = beginning(data, self._trained_on)
        self._first_data = self._first_data or sharded
        return sharded

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        return self.generators.inside()

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        from distributed.backends._torch.averaged_weights import AveragedTensors
        from distributed.backends._torch.frozen import leave_out_frozen
        from distributed.backends._torch.kind_of_model import kind_of
        from distributed.backends.weights import start_from

        notices: list[str] = []
        if job.names:
            self.wrapper = self._wrapper_of_several()
        self.plain = self.wrapper.build(job.model)
        self._batching.columns.read(self.plain, notices.append)
        self.kind = kind_of(self.plain, self.context)
        self._check_model(self.kind.model, here=True)
        job = self.kind.with_names_resolved(job)
        self.kind.take(job)
        self.kind.finish(self._example, self.device, self.config)
        self.model = self.kind.model
        if job.init_from is not None:
            # The main process loads the weights, and `wrap` gives them to all ranks.
            start_from(
                job.init_from, self.model, self.world, self.config.timeout_s, notice=notices.append, warn=self._warn
            )
        self.frozen = leave_out_frozen(self, notices.append)
        if self.config.activation_checkpointing:
            count = self.kind.checkpoint_activations()
            notices.append(f"activation checkpointing on {count} block{'s' * (count > 1)}")
        self.wrapped = self.wrapper.wrap(self.plain)
        self._is_new_wrapper = True
        self.averaged_weights = AveragedTensors(self)
        if self.config.compile:
            from distributed.backends._torch import compile_cache

            compile_cache.secure(self._warn)
            self.wrapper.compile()
        self.precision = self.kind.precision(self.wrapper.make_precision)
        self._prepare_update(job, batch, notices.append)
        self._prepare_losses(job)
        if self.mixed_precision != "no":
            is_slow = self.mixed_precision == "fp16" and self.device.type == "cpu"
            advice = ", where it is many times slower than float32: set mixed_precision='bf16'" if is_slow else ""
            notices.append(f"mixed precision {self.mixed_precision} on {self.device.type}{advice}")
        self.batch_dependent = split = self.kind.batch_dependent()
        if split:
            notices.append(
                "results depend on the split of a batch because of "
                + ", ".join(split[:3])
                + (", ..." if len(split) > 3 else "")
            )
        self._seed_generators()
        return notices

    def _wrapper_of_several(self) -> Wrapper:
        """Return the wrapper for several models."""
        return self.wrapper

    def _example(self) -> Any:
        """Return a batch of the first data, for a model that needs one to be built. The random generators stay unchanged."""
        if self._first_data is None:
            raise ConfigError(
                "the model has no weights before it has seen data: call fit() first, or build it with an Input"
            )
        with self.generators.untouched():
            batch = next(self._first_data.epoch(0)).micro_batches[0].batch
            self._first_data.close()
        return batch

    def _prepare_update(self, job: Job, batch: BatchPlan, notice: Callable[[str], None]) -> None:
        """Build the optimizer, then the schedule, then the object that makes updates with them."""
        from distributed.backends._torch import optim

        self.optimizer = self.kind.optimizer(self.wrapper.bind(job.optimizer), job.scheduler, self.merged, notice)
        # An optimizer of Keras is wrapped in one of torch.
        self.users_optimizer = getattr(self.optimizer, "keras", self.optimizer)
        scheduler = self.kind.scheduler(job, self.optimizer, self.merged, batch, notice)
        schedule = self.kind.schedule(scheduler, self.optimizer, self.merged)
        self.has_schedule = schedule.counts
        if text := schedule.notice():
            notice(text)
        optim.use_fused_sgd(self.optimizer, self.plain)
        self.update = self.wrapper.make_update(self.optimizer, schedule)
        self._trainable = {name: p.requires_grad for name, p in self.plain.named_parameters()}

    def _prepare_losses(self, job: Job) -> None:
        """Build the objects that compute losses and metrics from batches."""
        from distributed.backends._torch.averages import Averages
        from distributed.backends._torch.generating import Generation
        from distributed.backends._torch.over_all import ENGINE
        from distributed.backends.over_all import Wholes

        if isinstance(job.loss_fn, self.torch.nn.Module):  # a loss may have tensors, such as class weights
            job.loss_fn.to(self.device, self.torch.float64 if self.config.dtype == "float64" else None)
        self._generation = Generation(self, job) if job.predict_with_generate else None
        objective = self.kind.objective(job, self._notice)
        if job.is_own_loop:
            from distributed.backends._torch.own_steps import OwnPasses, TorchOwnSteps

            self.passes = passes = OwnPasses(self, objective)
            self.own_steps = TorchOwnSteps(self, passes)
        else:
            self.passes = self.kind.passes(self, objective)
        options: DataOptions = self.config.options("data")
        wholes = Wholes(
            ENGINE, self.world, is_presharded=options.presharded, warn=self._warn,
            keeping_generators=self._keeping_generators,
        )  # fmt: skip
        before = self._averages  # an evaluation before the first fit has found which metrics are means
        self._averages = Averages(
            self.kind.metrics(job), self.device, wholes=wholes, notice=self._notice, dtype=self.passes.dtype
        )  # fmt: skip
        self.measured = self._averages.measured
        if before is not None:
            self.measured.form = before.measured.form
        objective.add_metric = self._averages.add

    def _seed_generators(self) -> None:
        value = sample_seed(self.config.seed, self.update.step, self.context.rank)
        self.generators.seed(value)
        self.kind.seed(value)

    @contextlib.contextmanager
    def _keeping_generators(self) -> Iterator[None]:
        """Restore the random generators after a block that runs the code of metrics, so that it does not change training."""
        from distributed.backends._torch.over_all import alone

        with self.generators.untouched(), self.kind.without_draws(), alone():
            yield

    # ------------------------------------------------------------------ training

    def train_step(self, update_batch: UpdateBatch) -> StepResult:
        self.enter_training()
        if not self.passes.is_settled:
            self.passes.settle(update_batch.micro_batches[0].batch)
        self.begin_update(update_batch)
        passes = self.observer.counter or self.passes
        return self.end_update(update_batch, passes.run(update_batch))

    def begin_update(self, update_batch: UpdateBatch) -> None:
        """Make the model ready for the passes of an update. A collective."""
        if self._is_new_wrapper:
            self._is_new_wrapper = False
            self.wrapped = self.wrapper.before_first_update(update_batch)
            self.observer.see(update_batch.micro_batches[0])
        for parameter in self.update.parameters:  # the same as Optimizer.zero_grad, and 20 us faster
            parameter.grad = None
        if self.observer.timer is not None:
            self.observer.timer.begin_update()

    def end_update(self, update_batch: UpdateBatch, losses: list[Loss]) -> StepResult:
        """Make the update from the gradients of the passes that returned `losses`. A collective."""
        assert self._averages is not None
        result = self._averages.of_training(update_batch.micro_batches, losses, update_batch)
        self.wrapper.exchange()
        self.update.finish(update_batch, losses, result)
        if self.observer.timer is not None:
            self.observer.timer.end_update()
        return result

    def enter_training(self) -> None:
        """Put the model into training mode."""
        if self._is_training is not True:
            self.wrapped.train()
            self._is_training = True

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        self.update.look_back()  # check the last update before anything is logged, measured or saved
        assert self._averages is not None
        return self._averages.collect(results, self.world.gather)

    def learning_rates(self) -> list[float]:
        return self.update.rates()

    def step_schedule(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        self.update.schedule.step_outside(metrics, is_epoch_end=is_epoch_end)

    # ------------------------------------------------------------------ evaluation

    def eval_step(self, micro: MicroBatch) -> StepResult:
        assert self._averages is not None
        with self._evaluating():
            self.logged.weigh(micro.num_samples)
            with self.precision.autocast():
                # Evaluate the unwrapped model, because a wrapper may broadcast buffers.
                batch = self.passes.move(micro.batch)
                loss = self.passes.objective(self.plain, batch)
                if self._generation is not None:
                    loss = self._generation.replace(loss, batch)
            self.logged.weigh(None)
            return self._averages.of_evaluation(micro, loss)

    def predict_step(self, micro: MicroBatch) -> Any:
        from distributed.backends._torch.nested import move
        from distributed.backends._torch.outputs import Outputs

        with self._evaluating(), self.precision.autocast():
            outputs = self.passes.objective.predict(self.plain, self.passes.move(micro.batch))
        return Outputs(move(outputs, self.torch.device("cpu"), None), micro.num_samples)

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        from distributed.backends._torch import outputs

        options: DataOptions = self.config.options("data")
        return outputs.joined(outputs.by_rank(parts) if options.presharded else outputs.by_update(parts))

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self._is_training is not False:
            self.wrapped.eval()
            self._is_training = False
            self.share_buffers()
        with self.torch.no_grad():
            yield

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0. A collective."""
        for buffer in self.plain.buffers():
            self.world.copy_from(buffer, 0)

    # ------------------------------------------------------------------ state, end

    def save(self, directory: Path) -> dict[str, Any]:
        from distributed.backends._torch import checkpoint

        self.update.look_back()
        self.share_buffers()  # a resumed run has the stored buffers on every rank, so this run must have them too
        return checkpoint.save(self, directory)

    def load(self, directory: Path, state: Mapping[str, Any]) -> Callable[[], None]:
        from distributed.backends._torch import checkpoint

        finish = checkpoint.begin_load(self, directory, state, self._notice)

        def restore() -> None:
            if not finish():
                self._seed_generators()

        return restore

    def export(self, path: Path) -> None:
        self.kind.export(path)
        self.world.barrier()

    def take_weights(self, model: Any, directory: Path) -> Any:
        from distributed.backends._torch import checkpoint

        return checkpoint.take_weights(model, directory, self.config)

    def unwrap(self) -> None:
        # Workaround (torch 2.13, pytorch/pytorch#179291; may go when torch ends gloo's threads before the interpreter):
        # with gloo, 1 process of 8 aborts at exit while a DDP wrapper with its reducer's threads is alive.
        is_plain = self.wrapped is self.plain and self.context.world_size == 1 and self.device.type == "cpu"
        self.wrapper.release()
        self.observer.counter = None
        self.wrapped = self.plain
        self._is_training = None
        if hasattr(self, "update"):  # unset if `prepare` failed before
            self.update.forget()
            self.kind.thaw()
        if not is_plain:  # reference cycles hold the wrapper, and on a GPU the memory that the next fit needs
            gc.collect()

    def rewrap(self) -> None:
        from distributed.backends._torch.frozen import leave_out_frozen

        self.kind.freeze()
        _check_trainable(self.plain, self._trainable)
        self.frozen = leave_out_frozen(self, lambda text: None)  # the values may have changed since the last fit
        self._is_new_wrapper = True
        self.wrapped = self.wrapper.wrap(self.plain)
        self._is_training = None

    def teardown(self) -> None:
        if self.model is not None:
            self.unwrap()
        self.world.leave()


def _check_trainable(model: torch.nn.Module, before: Mapping[str, bool]) -> None:
    """Raise ConfigError if parameters of `model` were frozen or unfrozen since `before`, when the optimizer was built."""
    changed = [name for name, p in model.named_parameters() if p.requires_grad is not before[name]]
    if changed:
        raise ConfigError(
            f"{changed[0]} was {'un' * model.get_parameter(changed[0]).requires_grad}frozen after the first fit, and"
            " the optimizer does not follow: make a new Trainer with this model for the next phase"
        )
