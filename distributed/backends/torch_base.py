"""TorchBackend: the one torch step. Every torch engine overrides a few small hooks of it and nothing else.

torch is loaded in `setup()`, so that this file imports without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends._torch.observer import TorchObserver
from distributed.backends.base import Backend, If, OptionsT, Refusals, ShardedData
from distributed.backends.non_finite import NanPolicy, describe, vote
from distributed.config.data import DataOptions
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.data import sample_seed
from distributed.errors import ConfigError
from distributed.state import DataRole, Group, Job, MicroBatch, StepResult, Sums, WorkerContext

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.gradients import Gradients
    from distributed.backends._torch.lookback import Unread
    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.world import TorchWorld


# Of every engine that talks through a torch process group.
PROCESS_GROUPS: Refusals = {
    "communication_backend=mpi": "it is not in PyTorch's wheels: use gloo, or backend='horovod' under mpirun",
    "communication_backend=nccl": (
        If("on CPUs", lambda own: own.plan.device == "cpu", "set communication_backend='gloo'"),
    ),
}


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A backend without settings of its own."""


class TorchBackend(Backend[OptionsT]):
    """Forward, backward, clipping, NaN check, update, schedule, metrics and tensors for torch modules."""

    Options: ClassVar[type[Any]] = NoOptions
    refuses: ClassVar[Refusals] = PROCESS_GROUPS
    refuses_keras: ClassVar[str] = ""  # why Keras models do not work under this engine, where they do not
    world: TorchWorld
    observer: TorchObserver
    other_keras: ClassVar[str] = "choose another backend"  # what to do for Keras on another engine than torch

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self._is_training: bool | None = None
        self._step = 0  # updates done, for warm-up and messages
        self._first_data: ShardedData | None = None
        self.observer = TorchObserver(self)
        self._unread: Unread | None = None  # the newest update, while nobody knows whether its gradients were finite
        self._looks_later = False

    # ------------------------------------------------------------------ hooks of the torch family

    def _join(self) -> TorchWorld:
        """Join the other processes."""
        from distributed.backends._torch.world import ProcessGroup

        return ProcessGroup(self.plan, self.config, self._warn, self._transport())

    def _transport(self) -> str | None:
        """torch's word for how processes talk where `communication_backend` is unset; None: nccl on GPUs, else gloo."""
        return None

    def _build(self, given: Any) -> torch.nn.Module:
        """The user's model on this rank's device, before `_wrap`."""
        from distributed.backends._torch import modules

        return modules.build_model(given, self.config, self.device).to(self.device)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in training."""
        return model

    def _compile(self) -> None:
        """Let torch compile the model, as `_wrap` left it."""
        self.kind.compile()

    def _bind(self, optimizer: Any) -> Any:
        """The user's optimizer, around the parameters as `_wrap` left them."""
        return optimizer

    def _make_precision(self) -> Precision:
        from distributed.backends._torch.precision import Precision

        return Precision(self.mixed_precision, self.device, self.config)

    def _make_gradients(self) -> Gradients:
        from distributed.backends._torch.gradients import Gradients

        return Gradients(self._parameters, self.plain, self.device)

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside reduce no gradients."""
        return contextlib.nullcontext()

    def _backward(self, value: torch.Tensor) -> None:
        self.precision.scaled(value).backward()

    def _before_first_update(self, group: Group) -> None:
        """Once after each `_wrap`, when the first batch is known."""

    # ------------------------------------------------------------------ set-up

    def check(self, job: Job, *, here: bool) -> None:
        self._check_model(job.model, here=here)

    def _check_model(self, model: Any, *, here: bool) -> None:
        from distributed.backends._keras import models

        if not models.is_model(model):
            return
        if self.refuses_keras:
            raise ConfigError(f"backend={self.plan.backend!r} does not take Keras models: {self.refuses_keras}")
        models.check_engine("torch", self.plan.backend, here=here, otherwise=self.other_keras)

    def setup(self) -> WorkerContext:
        import torch

        from distributed.backends._torch.generators import OwnGenerators

        self.torch = torch
        self.world = self._join()
        self.context = self.world.context
        self.device = torch.device(self.context.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.generators = OwnGenerators(self.device)
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        return self.context

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        from distributed.backends._torch.kind_of_model import kind_of

        notices: list[str] = []
        self.plain = self._build(job.model)
        self.kind = kind_of(self.plain, self.context)
        self._check_model(self.kind.model, here=True)
        self.kind.finish(self._example, self.device, self.config)
        self.model = self.kind.model
        if self.config.activation_checkpointing:
            count = self.kind.checkpoint_activations()
            notices.append(f"activation checkpointing on {count} block{'s' * (count > 1)}")
        self._wrapped = self._wrap(self.plain)
        self._is_new_wrapper = True
        if self.config.compile:
            from distributed.backends._torch import compile_cache

            compile_cache.secure(self._warn)
            self._compile()
        self.precision = self._make_precision()
        self._prepare_updates(job, batch, notices.append)
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

    def _prepare_updates(self, job: Job, batch: BatchPlan, notice: Callable[[str], None]) -> None:
        """Optimizer, then schedule, and what an update needs beside them."""
        from distributed.backends._torch import optim
        from distributed.backends._torch.schedule import Schedule

        self.optimizer = self.kind.optimizer(self._bind(job.optimizer), job.scheduler, self.merged, notice)
        scheduler = self.kind.scheduler(job, self.optimizer, self.merged, batch, notice)
        self.schedule = Schedule(scheduler, self.optimizer, self.merged)
        self.has_schedule = self.schedule.counts
        if text := self.schedule.notice():
            notice(text)
        optim.use_fused_sgd(self.optimizer, self.plain)
        self._update = self.precision.updating(self.optimizer)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._trainable = {name: p.requires_grad for name, p in self.plain.named_parameters()}
        self._gradients = self._make_gradients()
        self._nan_policy = NanPolicy(self.config.nan_policy, lambda event: self.report(event))
        self._clipped_norm: torch.Tensor | None = None  # of the newest update, before clipping
        self._unread, self._looks_later = None, self._may_look_later()

    def _may_look_later(self) -> bool:
        """Whether a look at the gradients can wait for the next update: the device has work meanwhile, and no update is ever
        left out."""
        is_on_gpu = self._gradients.device.type == "cuda"
        return is_on_gpu and not self.precision.leaves_out and self.config.nan_policy != "skip"

    @property
    def users_optimizer(self) -> Any:
        return getattr(self.optimizer, "keras", self.optimizer)  # a Keras optimizer has one of torch's around it

    def _prepare_losses(self, job: Job) -> None:
        """From batches to losses and metrics."""
        from distributed.backends._torch.averages import Averages
        from distributed.backends._torch.over_all import ENGINE
        from distributed.backends.over_all import Wholes

        if isinstance(job.loss_fn, self.torch.nn.Module):  # its class weights, say
            job.loss_fn.to(self.device, self.torch.float64 if self.config.dtype == "float64" else None)
        self.objective = self.kind.objective(job, self._notice)
        self._settled = False
        self._total: torch.Tensor | None = None  # the count of a (sum, count) loss, while it is being summed
        self._to_dtype = self.torch.float64 if self.config.dtype == "float64" else None
        options: DataOptions = self.config.options("data")
        wholes = Wholes(
            ENGINE, self.world, is_presharded=options.presharded, warn=self._warn, keeping_generators=self._keeping_generators,
        )  # fmt: skip
        before = getattr(self, "_averages", None)  # an evaluation before the first fit has found out what is a mean
        self._averages = Averages(
            self.kind.metrics(job), self.device, wholes=wholes, notice=self._notice, dtype=self._to_dtype
        )  # fmt: skip
        if before is not None:
            self._averages.measured.form = before.measured.form
        self.measured = self._averages.measured
        self.objective.add_metric = self._averages.add
        self._moves = self.device.type != "cpu" or self._to_dtype is not None

    def _seed_generators(self) -> None:
        value = sample_seed(self.config.seed, self._step, self.context.rank)
        self.generators.seed(value)
        self.kind.seed(value)

    def _forked(self) -> contextlib.AbstractContextManager[None]:
        from distributed.backends._torch.generators import forked

        return forked(self.device)

    @contextlib.contextmanager
    def _keeping_generators(self) -> Iterator[None]:
        """The block for the code of metrics. Every generator is put back after it: what a metric draws must not change the
        numbers of training."""
        from distributed.backends._torch.over_all import alone

        with self.generators.untouched(), self.kind.without_draws(), alone():
            yield

    def own_generators(self) -> contextlib.AbstractContextManager[None]:
        return self.generators.inside()

    def batch_size_of(self, data: Any) -> int | None:
        from distributed.backends._torch.loading import loader_batch_size

        return loader_batch_size(data)

    def shard(self, data: Any, batch: BatchPlan, role: DataRole) -> ShardedData:
        from distributed.backends._torch.loading import shard

        options: DataOptions = self.config.options("data")
        sharded = shard(
            data,
            batch=batch,
            context=self.context,
            config=self.config,
            options=options,
            role=role,
            reduce=self.world.reduce,
        )
        self._first_data = self._first_data or sharded
        return sharded

    def _example(self) -> Any:
        """A batch of the data that came first, for a model that cannot be built without. Leaves no trace."""
        if self._first_data is None:
            raise ConfigError(
                "the model has no weights before it has seen data: call fit() first, or build it with an Input"
            )
        with self.generators.untouched():
            batch = next(self._first_data.epoch(0)).micro_batches[0].batch
            self._first_data.close()
        return batch

    # ------------------------------------------------------------------ the step

    def train_step(self, group: Group) -> StepResult:
        if self._is_training is not True:
            self._wrapped.train()
            self._is_training = True
        if not self._settled:
            self._settle(group.micro_batches[0].batch)
        if self._is_new_wrapper:
            self._is_new_wrapper = False
            self._before_first_update(group)
            self.observer.see(group.micro_batches[0])
        for parameter in self._parameters:  # Optimizer.zero_grad does the same in 20 us more
            parameter.grad = None
        micros = group.micro_batches
        items = self._count_items(micros) if self.objective.takes_count else None
        losses: list[Loss] = []
        if len(micros) > 1:
            with self._without_sync():
                for micro in micros[:-1]:
                    losses.append(self._forward_backward(micro, group, items, losses, False))
        losses.append(self._forward_backward(micros[-1], group, items, losses, True))
        result = self._averages.of_training(micros, losses, group)
        self._finish_update(group, losses, result)
        return result

    def _forward_backward(
        self, micro: MicroBatch, group: Group, items: torch.Tensor | None, done: list[Loss], is_last: bool
    ) -> Loss:
        """One forward and backward, scaled so that the synchronised gradient is the mean over the update's true count."""
        if micro.num_samples == 0:
            return self._weightless(micro, group, items, done, is_last)
        loss = self._forward(micro, items)
        world = self.context.world_size
        scale: Any
        if loss.count is None:
            scale = micro.num_samples * world / group.num_samples
        elif items is not None:
            scale = world / items
        else:  # the count of all ranks is not known yet: a nominal one now, the true one before clipping
            scale = world / group.num_samples
        if is_last and loss.count is not None and items is None:
            self._start_counting([*done, loss])
        self._backward(self._scaled(loss.value, scale))
        return loss

    def _weightless(
        self, micro: MicroBatch, group: Group, items: torch.Tensor | None, done: list[Loss], is_last: bool
    ) -> Loss:
        """The forward and backward of a rank without samples: takes part in every collective and leaves no trace."""
        torch = self.torch
        buffers = [(buffer, buffer.clone()) for buffer in self.plain.buffers()]
        with self._forked():
            loss = self._forward(micro, items)
            count = None if loss.count is None else torch.zeros((), device=self.device)
            loss.count = count
            if is_last and count is not None and items is None:
                self._start_counting([*done, loss])
            self._backward(torch.nan_to_num(loss.value) * 0.0)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        loss.value = loss.value.detach() * 0.0
        return loss

    def _forward(self, micro: MicroBatch, items: torch.Tensor | None) -> Loss:
        batch = self.move(micro.batch) if self._moves else micro.batch
        if self.mixed_precision == "no":
            return self.objective(self._wrapped, batch, items)
        with self.precision.autocast():
            return self.objective(self._wrapped, batch, items)

    def _scaled(self, value: torch.Tensor, scale: Any) -> torch.Tensor:
        """`value * scale`; a loss that is not finite makes every gradient NaN, so that all ranks see it after the sync."""
        if not value.requires_grad:
            raise ConfigError("the loss has no gradient: return it as a tensor, without .item(), .detach() or no_grad")
        if self.device.type == "cpu":
            if not math.isfinite(value.item()):
                return value * math.nan
        else:
            value = value * (1.0 + 0.0 * value.detach())
        return value if isinstance(scale, float) and scale == 1.0 else value * scale

    def _start_counting(self, losses: list[Loss]) -> None:
        """All-reduce the count of a (sum, count) loss while the last backward runs."""
        counts = [loss.count for loss in losses]
        total = self._on_device(sum(counts))
        self._total, self._counting = total, self.world.combine(total, "sum")

    def _on_device(self, number: Any) -> torch.Tensor:
        """`number` as float64 of shape [1] on this rank's device. The host does not wait."""
        value: torch.Tensor = self.torch.as_tensor(number, dtype=self.torch.float64).reshape(1)
        return value.to(self.device, non_blocking=True)

    def _finish_update(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        """Rescale, clip, look for NaN, then the one update."""
        self.precision.unscale(self.optimizer)
        gradients = self._gradients.views()
        if self._total is not None:
            self._counting.wait()
            self._gradients.rescale(gradients, group.num_samples / self._total)
            self._total = None
        if self.config.gradient_clipping is not None:
            self._clipped_norm = self._gradients.clip(gradients, self.config.gradient_clipping)
        if self._looks_later:
            self._look_back()
            self._unread = self._unread_of(gradients, group, losses)
        elif not self._are_finite(gradients):
            self._on_non_finite(group, losses, result)
        if result.skipped:
            self.precision.leave_out()
        else:
            self._apply_gradients()
        self._step += 1

    def _are_finite(self, gradients: list[torch.Tensor]) -> bool:
        if self._clipped_norm is not None:
            return math.isfinite(self._clipped_norm.item())
        return self._gradients.are_finite(gradients)

    def _unread_of(self, gradients: list[torch.Tensor], group: Group, losses: list[Loss]) -> Unread:
        from distributed.backends._torch.lookback import Unread

        norm = self._clipped_norm  # less itself: 0, or NaN
        bad = self._gradients.non_finite(gradients) if norm is None else (norm - norm)
        return Unread.of(bad, group, losses)

    def _look_back(self) -> None:
        """Do what `nan_policy` says about the newest update, if nobody has looked at it yet. Every rank."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.is_bad():
            self._on_non_finite(unread.group, unread.losses, StepResult([], unread.group.num_samples), is_late=True)

    def _apply_gradients(self) -> None:
        with self._warming_up():
            self._update()
        if self.schedule.follows_updates:
            self.schedule.step()

    def _warming_up(self) -> contextlib.AbstractContextManager[None]:
        """Within it the rates are those of the coming update."""
        is_warm = self._step >= self.config.warmup_steps
        return contextlib.nullcontext() if is_warm else self.schedule.warming_up(self._step)

    def _on_non_finite(self, group: Group, losses: list[Loss], result: StepResult, *, is_late: bool = False) -> None:
        """Every rank comes here together, because the synchronised gradients are the same everywhere. `is_late`: the update
        has been made, and is the newest one."""
        mine, world = vote(float(loss.value.detach()) for loss in losses), range(self.context.world_size)
        votes = self.world.reduce({rank: mine if rank == self.context.rank else 0.0 for rank in world})
        if not any(votes.values()) and self.precision.may_overflow():
            result.skipped = True  # the scaler lowers its scale
            return
        step = self._step - is_late
        where = describe(step + 1, group, votes)
        self._nan_policy.apply(step, where, result, can_be_made=not self.precision.leaves_out, is_late=is_late)

    # ------------------------------------------------------------------ results

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        self._look_back()  # before anything is logged, measured or saved
        return self._averages.collect(results, self.world.gather)

    def gradient_norm(self) -> float | None:
        """Return the norm of the newest update's gradient, for the observer."""
        return self._gradients.norm() if self._clipped_norm is None else float(self._clipped_norm)

    # ------------------------------------------------------------------ evaluation

    def eval_step(self, micro: MicroBatch) -> StepResult:
        with self._evaluating():
            with self.precision.autocast():
                loss = self.objective(self._eval_model(), self.move(micro.batch))
            return self._averages.of_evaluation(micro, loss)

    def predict_step(self, micro: MicroBatch) -> Any:
        from distributed.backends._torch.nested import move
        from distributed.backends._torch.outputs import Outputs

        with self._evaluating(), self.precision.autocast():
            outputs = self.objective.predict(self._eval_model(), self.move(micro.batch))
        return Outputs(move(outputs, self.torch.device("cpu"), None), micro.num_samples)

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        from distributed.backends._torch import outputs

        options: DataOptions = self.config.options("data")
        return outputs.joined(outputs.by_rank(parts) if options.presharded else outputs.by_update(parts))

    def _eval_model(self) -> torch.nn.Module:
        """The module to call in evaluation: the plain one, which broadcasts no buffers."""
        return self.plain

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        if self._is_training is not False:
            self._wrapped.eval()
            self._is_training = False
            self._sync_buffers()
        with self.torch.no_grad():
            yield

    def _sync_buffers(self) -> None:
        for buffer in self.plain.buffers():
            self.world.copy_from(buffer, 0)

    # ------------------------------------------------------------------ schedule, state, end

    def learning_rates(self) -> list[float]:
        return self.schedule.rates(self._step)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        self.schedule.end_epoch(metrics)

    def save(self, directory: Path) -> dict[str, Any]:
        from distributed.backends._torch import tensors

        self._look_back()
        self._sync_buffers()  # a resume gives every rank the stored ones, so a run that goes on has them too
        extra: dict[str, Any] = {"world_size": self.context.world_size, "step": self._step}
        extra["loss_form"] = self.objective.form if self._settled else None
        extra["means"] = self._averages.measured.form
        extra["over_all"] = self._averages.measured.wholes.save(directory)
        extra["model"] = self.kind.save_model(directory)
        extra["optimizer"] = self.kind.save_optimizer(self.optimizer, directory)
        extra |= self.schedule.state()
        extra["scaler"] = self.precision.state()
        tensors.save_rng(directory, self.context.rank, self.device)
        return extra

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        from distributed.backends._torch import tensors

        self.kind.load_model(directory, state.get("model") or {})
        self.kind.load_optimizer(self.optimizer, directory, state["optimizer"])
        self.schedule.load(state, self._notice)
        self.precision.load(state.get("scaler"))
        self._step = int(state["step"])
        self._averages.measured.form = state.get("means") or {}
        self._averages.measured.wholes.load(directory, state.get("over_all"))
        if form := state.get("loss_form"):  # found anew in another batch, it could be another one
            self.objective.form, self._settled = form, True
        is_same = int(state["world_size"]) == self.context.world_size
        if not is_same or not tensors.load_rng(directory, self.context.rank, self.device):
            self._seed_generators()

    def export(self, path: Path) -> None:
        self.kind.export(path)
        self.world.barrier()

    def take_weights(self, model: Any, directory: Path) -> Any:
        import torch

        from distributed.backends._keras.models import is_model
        from distributed.backends._torch import keras_module, modules, tensors

        made = modules.make_model(model, self.config, torch.device("cpu"))
        if is_model(made):
            keras_module.take_weights(made, directory, self.config.dtype)
            return made
        built = modules.build_model(made, self.config, torch.device("cpu"))
        tensors.load_model(built, directory)
        return built

    def unwrap(self) -> None:
        # torch 2.13 with gloo aborts at exit in 1 process of 8 while a DDP wrapper is alive (its reducer's threads).
        self._wrapped = self.plain
        self._is_training = self._unread = None
        gc.collect()

    def rewrap(self) -> None:
        self._check_trainable()
        self._is_new_wrapper = True
        self._wrapped = self._wrap(self.plain)
        self._is_training = None

    def _check_trainable(self) -> None:
        """The optimizer was built for the parameters that were trained first."""
        changed = [name for name, p in self.plain.named_parameters() if p.requires_grad is not self._trainable[name]]
        if changed:
            raise ConfigError(
                f"{changed[0]} was {'un' * self.plain.get_parameter(changed[0]).requires_grad}frozen after the first fit, and"
                " the optimizer does not follow: make a new Trainer with this model for the next phase"
            )

    def teardown(self) -> None:
        if self.model is not None:
            self.unwrap()
        self.world.leave()

    # ------------------------------------------------------------------ small things

    def _settle(self, batch: Any) -> None:
        with self._forked(), self.precision.autocast():
            votes = self.objective.probe(self.plain, self.move(batch))
        self.objective.settle(self.world.reduce(votes))
        self._wrapped.train()
        self._settled = True

    def _count_items(self, micros: list[MicroBatch]) -> torch.Tensor | None:
        """Labels of the whole update over all ranks, for models that divide by it. A collective where they do."""
        counts = [self.objective.label_count(micro.batch) for micro in micros if micro.num_samples]
        known = [count for count in counts if count is not None]
        total = self._on_device(sum(known))
        self.world.combine(total, "sum").wait()
        return total.reshape(())

    def move(self, batch: Any) -> Any:
        """Return `batch` on this rank's device, in the element type of the run."""
        from distributed.backends._torch.nested import move

        return move(batch, self.device, self._to_dtype) if self._moves else batch

    def _warn(self, text: str) -> None:
        self.report({"kind": "warning", "text": text})

    def _notice(self, text: str) -> None:
        if self.context.is_main_process:
            self.report({"kind": "notice", "text": text})
