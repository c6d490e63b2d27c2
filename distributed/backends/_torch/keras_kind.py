"""Train Keras models with the torch step. The files and the optimizers are the same as on TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from distributed.backends._keras import files, models
from distributed.backends._keras.batches import unpacked
from distributed.backends._keras.by_name import check_names
from distributed.backends._keras.names import trainable_variables
from distributed.backends._keras.randomness import common_state
from distributed.backends._torch import optim
from distributed.backends._torch.begun_load import BegunLoad
from distributed.backends._torch.keras_module import KerasModule, keras_scope, to_float64, widen
from distributed.backends._torch.keras_objective import KerasObjective
from distributed.backends._torch.keras_optimizer import KerasOptimizer, LearningRateSchedule
from distributed.backends._torch.kinds import Notice, TorchKind
from distributed.backends._torch.named_optimizers import CurveSchedule
from distributed.backends._torch.nested import move
from distributed.backends._torch.over_all import is_whole
from distributed.backends.arrays import ArrayBatch
from distributed.config.optimization import RateCurve
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.metrics.of_keras import is_from_keras, keras_classes

if TYPE_CHECKING:
    from distributed.backends._torch.optimizer_state import HoldsSlots
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan
    from distributed.state import Job


class KerasKind(TorchKind):
    """Hold a Keras model, its Keras optimizer and its compiled losses and metrics."""

    module: KerasModule

    @property
    def model(self) -> Any:
        return self.module.keras

    def finish(self, example: Callable[[], Any], device: torch.device, config: DistributedConfig) -> None:
        self._device, self._dtype = device, config.dtype
        models.check_model(self.model)
        with self._scope():
            if not self.model.built or not self.model.variables:
                self._build(example)
            if config.dtype == "float64":
                to_float64(self.model)
        self.module.adopt(self.context.rank)
        self.module.to(device)

    def _build(self, example: Callable[[], Any]) -> None:
        """Call the model once. A model without an Input has no variables before its first call."""
        batch = move(unpacked(example()).x, self._device, None)
        with torch.no_grad():
            self.model(batch)

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, variable.value) for name, variable in trainable_variables(self.model).items()]

    def _scope(self) -> contextlib.AbstractContextManager[None]:
        return keras_scope(self._device, self._dtype)

    def seed(self, value: int) -> None:
        with self._scope():
            common_state(create=True).assign([value & 0x3FFFFFFF, 0])

    @contextlib.contextmanager
    def without_draws(self) -> Iterator[None]:
        drawn = [*self.module.seeds, *([] if (common := common_state()) is None else [common])]
        before = [variable.value.clone() for variable in drawn]
        try:
            yield
        finally:
            with torch.no_grad():
                for variable, state in zip(drawn, before, strict=True):
                    variable.value.copy_(state)

    def checkpoint_activations(self) -> int:
        raise ConfigError(
            "activation_checkpointing=True does not work with Keras models: build the model inside keras.RematScope(), or"
            " drop it"
        )

    def arranged(self, batch: ArrayBatch) -> Any:
        return batch

    def with_names_resolved(self, job: Job) -> Job:
        check_names(job)
        return job

    def batch_dependent(self) -> list[str]:
        return models.batch_dependent(self.model)

    def optimizer(
        self, optimizer_or_factory: Any, scheduler: Any, merged: MergedConfig, notice: Notice
    ) -> torch.optim.Optimizer:
        with self._scope():
            chosen = models.chosen_optimizer(optimizer_or_factory, self.model, merged.config.learning_rate, notice)
            if scheduler is not None and not isinstance(scheduler, RateCurve):
                models.set_schedule(chosen, scheduler)
            if self._dtype == "float64":
                widen(chosen.variables[2:])  # all of the optimizer's variables except the counter and the rate
        rate = files.fixed_rate(chosen)
        self._schedule = None if rate is not None else chosen._learning_rate
        if self._schedule is None:
            rate = _given_rate(rate, merged, notice)
        elif merged.is_given("learning_rate"):
            raise ConfigError(
                f"learning_rate={merged.config.learning_rate:g} cannot replace the rates of"
                f" {type(self._schedule).__name__}: drop it, or set them in the schedule"
            )
        optimizer = KerasOptimizer(chosen, list(self.model.trainable_variables), rate or 0.0, self._scope)
        if self._schedule is not None:
            LearningRateSchedule(self._schedule, optimizer, 1.0, self._scope).step()
        return optimizer

    def scheduler(self, job: Job, optimizer: Any, merged: MergedConfig, batch: BatchPlan, notice: Notice) -> Any:
        before = optimizer.param_groups[0]["lr"]
        optim.scale_rates(optimizer, None, merged, batch, notice)
        if isinstance(job.scheduler, RateCurve):
            if self._schedule is not None:
                raise ConfigError(
                    f"scheduler={job.scheduler.kind!r} cannot replace {type(self._schedule).__name__} of the compiled optimizer:"
                    " set optimizer too, or compile with a number as learning_rate"
                )
            return CurveSchedule(optimizer, job.scheduler)
        if self._schedule is None:
            return None
        if merged.config.scheduler_interval == "epoch":
            raise ConfigError(
                f"scheduler_interval='epoch' does not work with {type(self._schedule).__name__}, which counts updates: drop it"
            )
        factor = optimizer.param_groups[0]["lr"] / before if before else 1.0
        return LearningRateSchedule(self._schedule, optimizer, factor, self._scope)

    def objective(self, job: Job, notice: Notice) -> KerasObjective:
        own = {name: m for name, m in job.metrics.items() if _is_metric(m) or isinstance(m, str)}
        with self._scope():
            return KerasObjective(job.loss_fn, job.training_step, own, self.module, notice, self._scope)

    def metrics(self, job: Job) -> Mapping[str, Callable[..., Any]]:
        # The objective measures Keras metric objects itself. With a training_step it has no outputs to measure. The
        # step returns the arguments of each metric, which is then computed over all samples like any other object.
        has_step = job.training_step is not None
        return {
            name: _ours(m)
            for name, m in job.metrics.items()
            if not isinstance(m, str) and (has_step or not _is_metric(m))
        }

    def save_model(self, directory: Path) -> dict[str, Any]:
        if self.context.is_main_process:
            files.save_model(self.model, directory)
        return {}

    def begin_load_model(self, directory: Path, left_out: Collection[str]) -> BegunLoad:
        def load() -> None:
            files.load_model(self.model, directory)
            self.module.mix_seeds(self.context.rank)

        return BegunLoad(load)

    def save_optimizer(self, optimizer: Any, directory: Path) -> dict[str, Any]:
        group = optimizer.param_groups[0]
        rate = group.get("initial_lr", group["lr"]) if self._schedule is None else None
        content = files.optimizer_content(optimizer.keras, self.model) | {"learning_rate": rate}
        if self.context.is_main_process:
            files.save_optimizer(optimizer.keras, self.model, directory)
        return content

    def begin_load_optimizer(
        self, optimizer: Any, directory: Path, content: Mapping[str, Any], held: HoldsSlots | None = None
    ) -> BegunLoad:
        return BegunLoad(lambda: self._load_optimizer(optimizer, directory, content))

    def _load_optimizer(self, optimizer: Any, directory: Path, content: Mapping[str, Any]) -> None:
        files.load_optimizer(optimizer.keras, self.model, directory, content)
        if self._schedule is None and content["learning_rate"] is not None:
            group, rate = optimizer.param_groups[0], float(content["learning_rate"])
            group.update(dict.fromkeys(("lr", "initial_lr") if "initial_lr" in group else ("lr",), rate))

    def export(self, path: Path) -> None:
        if self.context.is_main_process:
            files.export(self.model, path)


def _given_rate(rate: Any, merged: MergedConfig, notice: Notice) -> float:
    """Return the `learning_rate` that the user set, or the optimizer's own `rate`, which Keras keeps as float32."""
    learning_rate = merged.config.learning_rate
    if not merged.is_given("learning_rate"):
        return float(rate)
    if numpy.float32(learning_rate) != numpy.float32(rate):
        notice(f"learning_rate={learning_rate:g} replaces the optimizer's {rate:g}")
    return learning_rate


def _is_metric(value: Any) -> bool:
    return any(cls.__name__ == "Metric" for cls in keras_classes(value))


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a metric function that takes (outputs, targets). Keras's own metric functions take (targets, outputs)."""
    if is_whole(function):
        return function
    if is_from_keras(function):
        return lambda outputs, targets: function(targets, outputs)
    return function
