"""TorchBackend: the one torch step. Every torch engine overrides a few small hooks of it and nothing else.

torch is loaded in `setup()`, so that this file imports without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from distributed.backends.base import Backend, Job, Key, OptionsT, ShardedData
from distributed.callbacks import unknown_metric
from distributed.data import DataOptions, sample_seed
from distributed.errors import ConfigError, TrainingError
from distributed.plan import BatchPlan, ProcessPlan
from distributed.settings import MergedConfig
from distributed.state import Group, MicroBatch, StepResult, WorkerContext

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.objective import Loss

_MIN_LOSS_SCALE = 2.0**-20


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A backend without settings of its own."""


class TorchBackend(Backend[OptionsT]):
    """Forward, backward, clipping, NaN check, update, schedule, metrics and tensors for torch modules."""

    Options: ClassVar[type[Any]] = NoOptions

    def __init__(self, merged: MergedConfig, options: OptionsT, plan: ProcessPlan) -> None:
        super().__init__(merged, options, plan)
        self.precision = _precision(merged, plan.device)
        if merged.config.dtype == "float64" and self.precision != "no":
            raise ConfigError(
                f"mixed_precision={self.precision!r} contradicts dtype='float64': set mixed_precision='no'"
            )
        self._is_training: bool | None = None
        self._step = 0  # updates done, for warm-up and messages
        self._not_finite_in_a_row = 0

    # ------------------------------------------------------------------ hooks of the torch family

    def _join(self) -> WorkerContext:
        """Join the process group; the world of one process by default."""
        return WorkerContext(0, 1, 0, 1, 0, self.plan.device)

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module to call in training."""
        return model

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward passes inside reduce no gradients."""
        return contextlib.nullcontext()

    def _backward(self, value: torch.Tensor) -> None:
        (self._scaler.scale(value) if self._scaler is not None else value).backward()

    def _sum_over_ranks(self, values: torch.Tensor) -> Any:
        """Sum `values` in place over all ranks; returns a handle with `.wait()`, or None when it is done."""
        return None

    def _before_first_update(self, group: Group) -> None:
        """Once after each `_wrap`, when the first batch is known."""

    def _sync_buffers(self) -> None:
        """Give every rank the main process' buffers. All ranks."""

    def _leave(self) -> None:
        """Leave the process group."""

    # ------------------------------------------------------------------ set-up

    def setup(self) -> WorkerContext:
        import torch

        self.torch = torch
        self.context = self._join()
        self.device = torch.device(self.context.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
        return self.context

    def prepare(self, job: Job, batch: BatchPlan) -> list[str]:
        import torch

        from distributed.backends._torch import gradients, modules, optim
        from distributed.backends._torch.averages import Averages
        from distributed.backends._torch.objective import Objective

        notices: list[str] = []
        self.job, self.batch = job, batch
        self.model = self.plain = self._build_model(job.model).to(self.device)
        if self.config.activation_checkpointing:
            count = modules.checkpoint_activations(self.plain)
            notices.append(f"activation checkpointing on {count} block{'s' * (count > 1)}")
        self._wrapped = self._wrap(self.plain)
        if self.config.compile:
            modules.compile_calls(self.plain)
        self.optimizer = optim.build_optimizer(job.optimizer, self.plain, self.merged)
        if job.optimizer is not None:
            optim.replace_rate(self.optimizer, job.scheduler, self.merged, notices.append)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "LBFGS calls the model several times per update, which no backend supports: use AdamW or SGD"
            )
        self.scheduler = optim.build_scheduler(job.scheduler, self.optimizer, job.optimizer)
        optim.scale_rates(self.optimizer, self.scheduler, self.merged, batch, notices.append)
        self._full_rate = optim.full_rate(self.optimizer.param_groups[0])
        optim.use_fused_sgd(self.optimizer, self.plain)
        self._update = optim.lean_step(self.optimizer)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._steps_schedule = (
            self.scheduler is not None and self.config.scheduler_interval == "step" and not _is_plateau(self.scheduler)
        )
        self._scaler = self._build_scaler()
        self._rescale = gradients.rescale
        self._is_finite = gradients.FiniteCheck(self._parameters, self.plain, self.device)
        self._averages = Averages(job.metrics, self.device)
        self.objective = Objective(job.loss_fn, job.training_step, self.plain, notice=self._notice)
        self._settled = False
        self._is_new_wrapper = True
        self._total: torch.Tensor | None = None  # the count of a (sum, count) loss, while it is being summed
        self._clipped_norm: torch.Tensor | None = None  # of the newest update, before clipping
        self._to_dtype = torch.float64 if self.config.dtype == "float64" else None
        self._moves = self.device.type != "cpu" or self._to_dtype is not None
        if self.precision != "no":
            notices.append(f"mixed precision {self.precision} on {self.device.type}")
        if split := modules.batch_dependent(self.plain):
            notices.append(
                "results depend on the split of a batch because of "
                + ", ".join(split[:3])
                + (", ..." if len(split) > 3 else "")
            )
        self.seed_streams()
        return notices

    def _build_model(self, given: Any) -> torch.nn.Module:
        import torch

        model = given
        if not isinstance(given, torch.nn.Module):
            with torch.random.fork_rng():
                torch.manual_seed(self.config.seed)
                model = given()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"the model factory returned a {type(model).__name__}: return a torch.nn.Module")
        if self.config.dtype == "float64":
            model.double()
        return model

    def _build_scaler(self) -> Any:
        if self.precision != "fp16":
            return None
        config = self.config
        return self.torch.amp.GradScaler(
            self.device.type, init_scale=config.scaler_init_scale, growth_interval=config.scaler_growth_interval
        )

    def seed_streams(self) -> None:
        """Seed the generators (dropout and the like) from (seed, step, rank)."""
        import numpy

        value = sample_seed(self.config.seed, self._step, self.context.rank)
        self.torch.manual_seed(value)
        random.seed(value)
        numpy.random.seed(value >> 32)

    def batch_size_of(self, data: Any) -> int | None:
        from distributed.backends._torch.loading import loader_batch_size

        return loader_batch_size(data)

    def shard(self, data: Any, batch: BatchPlan, train: bool) -> ShardedData:
        from distributed.backends._torch.loading import shard

        options: DataOptions = self.config.options("data")
        return shard(
            data,
            batch=batch,
            context=self.context,
            config=self.config,
            options=options,
            train=train,
            reduce=self.reduce,
        )

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
        result = self._averages.of_training(micros, losses, group.num_samples)
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
        with torch.random.fork_rng():
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
        batch = micro.batch
        if self._moves:
            batch = self._move(batch)
        if self.precision == "no":
            return self.objective(self._wrapped, batch, items)
        with self._autocast():
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
        total = self.torch.as_tensor(sum(counts), dtype=self.torch.float64, device=self.device).reshape(1)
        self._total, self._counting = total, self._sum_over_ranks(total)

    def _finish_update(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        """Rescale, clip, look for NaN, then the one update."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._total is not None:
            if self._counting is not None:
                self._counting.wait()
            self._rescale(gradients, group.num_samples / self._total)
            self._total = None
        if self.config.gradient_clipping is not None:
            norm = self.torch.nn.utils.clip_grad_norm_(self._parameters, self.config.gradient_clipping)
            self._clipped_norm = norm
            is_finite = math.isfinite(norm.item())
        else:
            is_finite = self._is_finite(gradients)
        if is_finite:
            self._not_finite_in_a_row = 0
        else:
            self._on_non_finite(group, losses, result)
        if not result.skipped:
            self._apply_gradients()
        elif self._scaler is not None:
            self._scaler.update()  # lowers the scale after an overflow
        self._step += 1

    def _apply_gradients(self) -> None:
        rates = None
        if self._step < self.config.warmup_steps:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            self._set_rates([rate * (self._step + 1) / self.config.warmup_steps for rate in rates])
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            self._update()
        if rates is not None:
            self._set_rates(rates)
        if self._steps_schedule:
            self._step_schedule()

    def _step_schedule(self, *args: Any) -> None:
        if self._step > 0:
            self.scheduler.step(*args)
            return
        with warnings.catch_warnings():  # a schedule that came by value no longer knows the optimizer's patched step
            warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
            self.scheduler.step(*args)

    def _on_non_finite(self, group: Group, losses: list[Loss], result: StepResult) -> None:
        """Every rank comes here together, because the synchronised gradients are the same everywhere."""
        from distributed.backends._torch.averages import without_weight
        from distributed.backends._torch.gradients import describe, vote

        mine, world = vote(losses), range(self.context.world_size)
        votes = self.reduce({rank: mine if rank == self.context.rank else 0.0 for rank in world})
        if self._scaler is not None and not any(votes.values()) and self._scaler.get_scale() > _MIN_LOSS_SCALE:
            result.skipped = True  # an fp16 overflow: the scaler lowers its scale
            return
        where = describe(self._step + 1, group, votes)
        policy = self.config.nan_policy
        if policy == "stop":
            raise TrainingError(
                f"{where}: stopped before the update. Lower learning_rate, set gradient_clipping, or set nan_policy=skip"
            )
        is_made = policy == "warn" and self._scaler is None  # a scaler leaves such an update out by itself
        self._not_finite_in_a_row += 1
        if self._not_finite_in_a_row in (1, 10, 100, 1000):
            self.report(
                {"kind": "warning", "text": f"{where}: {'update made anyway' if is_made else 'update left out'}"}
            )
        if policy == "skip":  # what is reported are means over the updates that were made
            result.skipped, result.averages, result.deferred = True, without_weight(result.averages), []

    # ------------------------------------------------------------------ results

    def collect(self, results: Sequence[StepResult]) -> dict[str, tuple[float, float]]:
        total = self.reduce(self._averages.local_sums(results))
        names = dict.fromkeys(name for name, _ in total)
        return {name: (total[name, "sum"], total[name, "count"]) for name in names}

    def gradient_norm(self) -> float | None:
        if self._clipped_norm is not None:
            return float(self._clipped_norm)
        gradients = [p.grad for p in self._parameters if p.grad is not None and not p.grad.is_sparse]
        return float(self.torch.nn.utils.get_total_norm(gradients)) if gradients else None

    # ------------------------------------------------------------------ evaluation

    def eval_step(self, micro: MicroBatch) -> StepResult:
        with self._evaluating():
            return self._averages.of_evaluation(micro, self._eval_forward(micro.batch))

    def _eval_forward(self, batch: Any) -> Loss:
        batch = self._move(batch) if self._moves else batch
        with self._autocast() if self.precision != "no" else contextlib.nullcontext():
            return self.objective(self._eval_model(), batch)

    def predict_step(self, micro: MicroBatch) -> Any:
        from distributed.backends._torch.modules import move

        with self._evaluating():
            batch = self._move(micro.batch) if self._moves else micro.batch
            model = self._eval_model()
            with self._autocast() if self.precision != "no" else contextlib.nullcontext():
                if isinstance(batch, Mapping):
                    target = self.objective.target_name(batch)
                    outputs = model(**{name: value for name, value in batch.items() if name != target})
                elif isinstance(batch, (tuple, list)):
                    outputs = model(*(batch[:-1] if len(batch) > 1 else batch))
                else:
                    outputs = model(batch)
        return move(outputs, self.torch.device("cpu"), None)

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

    # ------------------------------------------------------------------ collectives

    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        if self.context.world_size == 1 or not sums:
            return dict(sums)
        values = self.torch.tensor(list(sums.values()), dtype=self.torch.float64, device=self._collective_device())
        handle = self._sum_over_ranks(values)
        if handle is not None:
            handle.wait()
        return dict(zip(sums, values.tolist(), strict=True))

    def _collective_device(self) -> torch.device:
        return self.device

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def key_value_store(self) -> Any:
        return None

    def barrier(self) -> None:
        return None

    # ------------------------------------------------------------------ schedule, state, end

    def learning_rates(self) -> list[float]:
        factor = min(1.0, (self._step + 1) / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        return [float(group["lr"]) * factor for group in self.optimizer.param_groups]

    def _set_rates(self, rates: Sequence[float]) -> None:
        from distributed.backends._torch.optim import set_rates

        set_rates(self.optimizer, rates)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        if self.scheduler is None or self._steps_schedule:
            return
        if not _is_plateau(self.scheduler):
            self._step_schedule()
            return
        name = self.config.monitor
        if name not in metrics:
            if self.merged.is_typed("monitor"):
                raise unknown_metric("monitor", name, metrics)
            name = "loss"
        self._step_schedule(metrics[name])

    def save(self, directory: Path) -> dict[str, Any]:
        from distributed.backends._torch import tensors

        self._sync_buffers()  # a resume gives every rank the stored ones, so a run that goes on has them too
        extra: dict[str, Any] = {
            "world_size": self.context.world_size, "step": self._step, "learning_rate": self._full_rate,
        }  # fmt: skip
        if self.context.is_main_process:
            extra["model"] = tensors.save_model(self.plain, directory)
            extra["optimizer"] = tensors.save_optimizer(self.optimizer, tensors.named_parameters(self.plain), directory)
            extra["scheduler"] = tensors.scheduler_state(self.scheduler) if self.scheduler is not None else None
            extra["scaler"] = self._scaler.state_dict() if self._scaler is not None else None
        tensors.save_rng(directory, self.context.rank)
        return extra

    def load(self, directory: Path, state: Mapping[str, Any]) -> None:
        from distributed.backends._torch import tensors
        from distributed.backends._torch.optim import change_rates

        tensors.load_model(self.plain, directory)
        tensors.load_optimizer(self.optimizer, tensors.named_parameters(self.plain), directory, state["optimizer"])
        if self.scheduler is not None and state.get("scheduler") is not None:
            tensors.load_scheduler_state(self.scheduler, state["scheduler"])
        if self._scaler is not None and state.get("scaler"):
            self._scaler.load_state_dict(dict(state["scaler"]))
        self._step = int(state["step"])
        before, now = float(state.get("learning_rate", self._full_rate)), self._full_rate
        if before != now:  # the settings of this command hold, for the rest of the run
            change_rates(self.optimizer, self.scheduler, lambda rate: rate * (now / before))
            self._notice(f"learning_rate={now:g} replaces the checkpoint's {before:g}")
        if int(state["world_size"]) == self.context.world_size:
            tensors.load_rng(directory, self.context.rank)
        else:
            self.seed_streams()

    def export(self, path: Path) -> None:
        from distributed.backends._torch import tensors

        if self.context.is_main_process:
            tensors.save_weights(self.plain, path)
        self.barrier()

    def join_outputs(self, parts: list[list[tuple[int, int, Any]]]) -> Any:
        from distributed.backends._torch.modules import interleave

        return interleave(parts)

    def take_weights(self, model: Any, directory: Path) -> Any:
        from distributed.backends._torch import tensors

        built = self._build_model(model)
        tensors.load_model(built, directory)
        return built

    def unwrap(self) -> None:
        # torch 2.13 with gloo aborts at exit in 1 process of 8 while a DDP wrapper is alive (its reducer's threads).
        self._wrapped = self.plain
        self._is_training = None
        gc.collect()

    def rewrap(self) -> None:
        self._is_new_wrapper = True
        self._wrapped = self._wrap(self.plain)
        self._is_training = None

    def teardown(self) -> None:
        if self.model is not None:
            self.unwrap()
        self._leave()

    # ------------------------------------------------------------------ small things

    def _settle(self, batch: Any) -> None:
        with self.torch.random.fork_rng(), self._autocast() if self.precision != "no" else contextlib.nullcontext():
            votes = self.objective.probe(self.plain, self._move(batch) if self._moves else batch)
        self.objective.settle(self.reduce(votes))
        self._wrapped.train()
        self._settled = True

    def _count_items(self, micros: list[MicroBatch]) -> torch.Tensor | None:
        """Labels of the whole update over all ranks, for models that divide by it. A collective where they do."""
        counts = [self.objective.label_count(micro.batch) for micro in micros if micro.num_samples]
        known = [count for count in counts if count is not None]
        total = self.torch.as_tensor(sum(known), dtype=self.torch.float64, device=self.device).reshape(1)
        if (handle := self._sum_over_ranks(total)) is not None:
            handle.wait()
        return total.reshape(())

    def _move(self, batch: Any) -> Any:
        from distributed.backends._torch.modules import move

        return move(batch, self.device, self._to_dtype)

    def _autocast(self) -> Any:
        dtype = self.torch.float16 if self.precision == "fp16" else self.torch.bfloat16
        return self.torch.autocast(self.device.type, dtype)

    def _notice(self, text: str) -> None:
        if self.context.is_main_process:
            self.report({"kind": "notice", "text": text})


def _precision(merged: MergedConfig, device: str) -> str:
    value = merged.config.mixed_precision
    if value is True:
        return "fp16" if device == "cuda" else "bf16"
    return "no" if value is False else str(value)


def _is_plateau(scheduler: Any) -> bool:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return isinstance(scheduler, ReduceLROnPlateau)
