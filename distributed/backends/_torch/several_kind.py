"""Build optimizers, schedules, precision and losses of several models, and save them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch import named_optimizers, optim, tensors
from distributed.backends._torch.begun_load import BegunLoad
from distributed.backends._torch.kinds import Notice, TorchKind
from distributed.backends._torch.several_models import SeveralModels
from distributed.backends._torch.several_objective import SeveralObjective
from distributed.backends._torch.several_optimizers import (
    SeveralOptimizers,
    SeveralPrecisions,
    SeveralSchedules,
    named_notice,
)
from distributed.backends._torch.several_passes import SeveralPasses
from distributed.backends._torch.several_update import MemberUpdate, SeveralUpdate
from distributed.errors import CheckpointError
from distributed.state import WorkerContext

if TYPE_CHECKING:
    from distributed.backends._torch.optimizer_state import HoldsSlots
    from distributed.backends._torch.precision import Precision
    from distributed.backends.torch_base import TorchBackend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import BatchPlan
    from distributed.state import Job


class SeveralKind(TorchKind):
    """Hold several torch modules, of which some are trained, each with its own optimizer and schedule."""

    module: SeveralModels
    is_one_model = False

    def __init__(self, module: SeveralModels, context: WorkerContext = tensors.ALONE) -> None:
        super().__init__(module, context)
        self._kinds = {name: TorchKind(each, context) for name, each in module.items()}
        self._trained: list[str] = []
        self._notice: Notice = lambda text: None  # set by `objective`

    def take(self, job: Job) -> None:
        self._trained = [name for name in job.names if name in job.optimizer]
        self.module.train_only(self._trained)

    def freeze(self) -> None:
        self.module.freeze()

    def thaw(self) -> None:
        self.module.thaw()

    def precision(self, make: Callable[[], Precision]) -> SeveralPrecisions:
        return SeveralPrecisions({name: make() for name in self._trained})

    def optimizer(
        self, optimizer_or_factory: Any, scheduler: Any, merged: MergedConfig, notice: Notice
    ) -> SeveralOptimizers:
        """Return the optimizers of all models that are trained."""
        made: dict[str, torch.optim.Optimizer] = {}
        for name in self._trained:
            made[name] = self._kinds[name].optimizer(
                optimizer_or_factory[name], scheduler.get(name), merged, named_notice(name, notice)
            )
            optim.use_fused_sgd(made[name], self.module[name])
        return SeveralOptimizers(made)

    def scheduler(
        self, job: Job, optimizer: torch.optim.Optimizer, merged: MergedConfig, batch: BatchPlan, notice: Notice
    ) -> dict[str, Any]:
        """Return the schedule of each model that is trained, or None for a constant rate."""
        assert isinstance(optimizer, SeveralOptimizers)
        return {
            name: self._kinds[name].scheduler(job.of_model(name), each, merged, batch, named_notice(name, notice))
            for name, each in optimizer.items()
        }

    def schedule(self, scheduler: Any, optimizer: torch.optim.Optimizer, merged: MergedConfig) -> SeveralSchedules:
        assert isinstance(optimizer, SeveralOptimizers)
        return SeveralSchedules(
            {name: self._kinds[name].schedule(scheduler[name], each, merged) for name, each in optimizer.items()}
        )

    def update(self, backend: TorchBackend[Any], optimizer: torch.optim.Optimizer, schedule: Any) -> SeveralUpdate:
        assert isinstance(optimizer, SeveralOptimizers) and isinstance(backend.precision, SeveralPrecisions)
        members = {
            name: MemberUpdate(backend, each, schedule[name], backend.precision[name], name)
            for name, each in optimizer.items()
        }
        return SeveralUpdate(members, optimizer, schedule)

    def objective(self, job: Job, notice: Notice) -> SeveralObjective:
        self._notice = notice
        return SeveralObjective(None, job.training_step, self.module, notice=notice)

    def passes(self, backend: TorchBackend[Any], objective: Any) -> SeveralPasses:
        return SeveralPasses(backend, objective)

    # Checkpoints. Every rank calls each of the following methods.

    def save_optimizer(self, optimizer: torch.optim.Optimizer, directory: Path) -> dict[str, Any]:
        return {**super().save_optimizer(optimizer, directory), "classes": _classes(optimizer)}

    def begin_load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        directory: Path,
        content: Mapping[str, Any],
        held: HoldsSlots | None = None,
    ) -> BegunLoad:
        assert isinstance(optimizer, SeveralOptimizers)
        here, there = _classes(optimizer), content.get("classes")
        if here != there:
            raise CheckpointError(
                f"the optimizers are {here}, the checkpoint holds {there or content.get('class')}: use those of the checkpoint"
                " or start without it"
            )
        load = super().begin_load_optimizer(optimizer, directory, content, held)
        optimizers = dict(optimizer.items())

        def finish() -> None:
            options = {name: named_optimizers.options_of(each) for name, each in optimizers.items()}
            load.finish()
            for name, each in optimizers.items():
                if named_optimizers.is_named(each):
                    named_optimizers.set_options(each, options[name], named_notice(name, self._notice))

        return load._replace(finish=finish)


def _classes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    assert isinstance(optimizer, SeveralOptimizers)
    return {name: type(each).__name__ for name, each in optimizer.items()}
