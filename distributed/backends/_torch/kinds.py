"""Define the parts of a step that depend on the kind of model: names and files, optimizer, loss and metrics.

All other parts of a step are the same for all kinds of model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch import modules, named_losses, optim, optimizer_state, recomputing, tensors
from distributed.backends._torch.begun_load import BegunLoad, complete
from distributed.backends._torch.objective import Objective
from distributed.backends._torch.passes import Passes
from distributed.backends._torch.schedule import Schedule
from distributed.backends._torch.update import Update
from distributed.backends.arrays import ArrayBatch
from distributed.backends.base import TARGET_NAMES
from distributed.config.optimization import NamedOptimizer
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.state import WorkerContext

if TYPE_CHECKING:
    from distributed.backends._torch.precision import Precision
    from distributed.backends.torch_base import TorchBackend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan
    from distributed.state import Job

Notice = Callable[[str], None]


class TorchKind:
    """Hold a torch module with its torch optimizer and schedule."""

    is_one_model = True

    def __init__(self, module: torch.nn.Module, context: WorkerContext = tensors.ALONE) -> None:
        self.module, self.context = module, context
        self.left_out: Collection[str] = ()  # names of the parameters that checkpoints leave out

    @property
    def model(self) -> Any:
        """The user's own model object."""
        return self.module

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return (name, parameter) of each parameter, by the names that settings and callbacks use."""
        return tensors.named_parameters(self.module)

    def take(self, job: Job) -> None:
        """Learn from `job` which models are trained, if there are several. Called before the module is wrapped."""

    def freeze(self) -> None:
        """Freeze the models that are not trained. Called before a further fit."""

    def thaw(self) -> None:
        """Undo what `take` and `freeze` have frozen. Called at the end of each fit."""

    def finish(self, example: Callable[[], Any], device: torch.device, config: DistributedConfig) -> None:
        """Build the parts of the model that need a batch to be built. Called before the module is wrapped."""

    def seed(self, value: int) -> None:
        """Seed the generators that the model draws from in addition to torch's."""

    def without_draws(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that restores the model's own generators at its end. torch's generators are not included."""
        return contextlib.nullcontext()

    def checkpoint_activations(self) -> int:
        """Recompute activations in the backward pass. Return the number of blocks whose activations are recomputed."""
        return recomputing.checkpoint_activations(self.module)

    def arranged(self, batch: ArrayBatch) -> Any:
        """Return a batch of arrays in the form of a data set's batch: `(*inputs, targets)` or a dict with `labels`.

        Raises ConfigError for sample weights, which a loss of torch does not take.
        """
        x, *targets = batch
        if len(targets) > 1:
            raise named_losses.weights_refused()
        if not isinstance(x, dict):
            return (*(x if isinstance(x, tuple) else (x,)), *targets)
        if taken := [name for name in TARGET_NAMES if targets and name in x]:
            raise ConfigError(f"x has an entry {taken[0]!r}, which is a name of targets: rename it, or drop y")
        return {**x, **({"labels": targets[0]} if targets else {})}

    def with_names_resolved(self, job: Job) -> Job:
        """Return the job with functions for the loss and the metrics that it gives by name."""
        return named_losses.resolved(job)

    def compile(self) -> None:
        """Let torch compile the calls of the module."""
        modules.compile_calls(self.module)

    def batch_dependent(self) -> list[str]:
        """Return the names of parts whose output depends on how a batch is split."""
        return modules.batch_dependent(self.module)

    def optimizer(
        self, optimizer_or_factory: Any, scheduler: Any, merged: MergedConfig, notice: Notice
    ) -> torch.optim.Optimizer:
        """Return the given optimizer, or the default one. A `learning_rate` set by the user replaces its rate."""
        optimizer = optim.build_optimizer(optimizer_or_factory, self.module, merged, notice)
        if optimizer_or_factory is not None and not isinstance(optimizer_or_factory, NamedOptimizer):
            optim.replace_rate(optimizer, scheduler, merged, notice)
        return optimizer

    def scheduler(
        self, job: Job, optimizer: torch.optim.Optimizer, merged: MergedConfig, batch: BatchPlan, notice: Notice
    ) -> Any:
        """Return the schedule of `job`, bound to `optimizer`.

        Scale the rates of both with the batch size if `lr_scaling` asks for it.
        """
        scheduler = optim.build_scheduler(job.scheduler, optimizer, job.optimizer)
        optim.scale_rates(optimizer, scheduler, merged, batch, notice)
        return scheduler

    def schedule(self, scheduler: Any, optimizer: torch.optim.Optimizer, merged: MergedConfig) -> Any:
        """Return the object that sets the rates of `optimizer` with the result of `scheduler()`."""
        return Schedule(scheduler, optimizer, merged)

    def precision(self, make: Callable[[], Precision]) -> Precision:
        """Return the mixed precision of a fit. `make` returns that of one optimizer."""
        return make()

    def update(self, backend: TorchBackend[Any], optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
        """Return the object that makes updates from the gradients."""
        return Update(backend, optimizer, schedule)

    def passes(self, backend: TorchBackend[Any], objective: Objective) -> Passes:
        """Return the object that runs forward and backward passes."""
        return Passes(backend, objective)

    def objective(self, job: Job, notice: Notice) -> Objective:
        """Return the objective, which computes losses from batches."""
        assert not isinstance(job.loss_fn, str)  # see `with_names_resolved`
        return Objective(job.loss_fn, job.training_step, self.module, notice=notice)

    def metrics(self, job: Job) -> Mapping[str, Callable[..., Any]]:
        """Return name -> function of (outputs, targets), which returns one of the forms of a loss."""
        return job.metrics

    # Checkpoints. Every rank calls each of the following methods.

    def save_model(self, directory: Path) -> dict[str, Any]:
        return tensors.save_model(self.module, directory, self.context, self.left_out)

    def load_model(self, directory: Path, left_out: Collection[str]) -> None:
        complete(self.begin_load_model(directory, left_out))

    def begin_load_model(self, directory: Path, left_out: Collection[str]) -> BegunLoad:
        """Begin what `load_model` does."""
        return tensors.begin_load_model(self.module, directory, left_out, self.context)

    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: Path) -> dict[str, Any]:
        return optimizer_state.save_optimizer(optimizer, tensors.named_parameters(self.module), directory, self.context)

    def begin_load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        directory: Path,
        content: Mapping[str, Any],
        held: optimizer_state.HoldsSlots | None = None,
    ) -> BegunLoad:
        """Begin to restore what `save_optimizer` wrote.

        `held` gets the tensors of a parameter's shape, if there is one.
        """
        return optimizer_state.begin_load_optimizer(
            optimizer, tensors.named_parameters(self.module), directory, content, held, self.context
        )

    def export(self, path: Path) -> None:
        tensors.save_weights(self.module, path, self.context)
