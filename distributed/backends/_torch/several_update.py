"""Make the updates of several models: each has an optimizer, a schedule and a loss scale of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.backends._torch.update import Update
from distributed.backends.non_finite import without_weight

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.precision import Precision
    from distributed.backends._torch.schedule import Schedule
    from distributed.backends._torch.several_optimizers import SeveralOptimizers, SeveralSchedules
    from distributed.backends.torch_base import TorchBackend
    from distributed.state import StepResult, UpdateBatch


class MemberUpdate(Update):
    """Make the updates of one of several models. There may be any number of them in an update batch.

    `step` is the number of update batches, so that warm-up and schedule do not depend on how often a batch updates the
    model.
    """

    def __init__(
        self,
        backend: TorchBackend[Any],
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        precision: Precision,
        name: str,
    ) -> None:
        super().__init__(backend, optimizer, schedule, precision)
        self._label = f"{name}: "
        self.results: list[StepResult] = []  # of the updates of this update batch

    def finish(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult) -> None:
        """Make one update. All ranks must call it. The update is skipped if `nan_policy` or the loss scale says so."""
        self.results.append(result)
        self._make_ready(update_batch, losses, result)
        if result.skipped:
            self._precision.leave_out()
        else:
            with self._warming_up():
                self._apply()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run the backward pass on."""
        scaled: torch.Tensor = self._precision.scaled(loss)
        return scaled

    def end_batch(self) -> list[StepResult]:
        """Count the update batch, and return the results of its updates. The schedule waits while updates are skipped."""
        results, self.results = self.results, []
        if self.schedule.follows_updates and not any(result.skipped for result in results):
            self.schedule.step()
        self.step += 1
        return results


class SeveralUpdate:
    """Hold the updates of several models by name, in the place of the `Update` of one model."""

    def __init__(
        self, members: Mapping[str, MemberUpdate], optimizer: SeveralOptimizers, schedule: SeveralSchedules
    ) -> None:
        self.members, self.optimizer, self.schedule = members, optimizer, schedule
        self.parameters = [parameter for each in members.values() for parameter in each.parameters]

    @property
    def step(self) -> int:
        """The number of update batches so far."""
        return next(iter(self.members.values())).step

    def finish(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult) -> None:
        """End the update batch, whose updates have been made."""
        results = [each for member in self.members.values() for each in member.end_batch()]
        result.skipped = any(each.skipped for each in results)
        if any(each.deferred is not None for each in results):  # `NanPolicy` has dropped what an update reports
            result.averages, result.deferred = without_weight(result.averages), []

    def look_back(self) -> None:
        """Check the newest update of each model, if that has not been done yet. All ranks must call it."""
        for each in self.members.values():
            each.look_back()

    def resume(self, step: int) -> None:
        """Continue after `step` update batches."""
        for each in self.members.values():
            each.resume(step)

    def forget(self) -> None:
        """Drop the pending checks."""
        for each in self.members.values():
            each.forget()

    def gradient_norm(self) -> float | None:
        """Return the norm of the newest gradients of all models before clipping. All ranks must call it."""
        norms = [norm for each in self.members.values() if (norm := each.gradient_norm()) is not None]
        return math.hypot(*norms) if norms else None

    def rates(self) -> list[float]:
        """Return the rate of each parameter group for the next update, model by model."""
        return [rate for each in self.members.values() for rate in each.rates()]
