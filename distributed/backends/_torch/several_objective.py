"""Record the losses that a training_step of several models passes to `update`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from distributed.backends._torch.objective import Loss, Objective, as_loss
from distributed.errors import ConfigError
from distributed.metrics.monitor import check_names


class StepLosses:
    """Record the losses of one micro-batch in the order of the calls of `update`."""

    def __init__(self) -> None:
        self._losses: dict[str, list[Loss]] = {}

    def add(self, name: str, loss: Loss) -> None:
        """Record the loss of one call of `update`."""
        before = self._losses.setdefault(name, [])
        if before and (before[0].count is None) != (loss.count is None):
            raise ConfigError(
                f"update({name!r}, ...) got a mean over samples and a pair (sum, count) in one step: use one of these forms"
            )
        before.append(Loss(loss.value.detach(), loss.count))

    def joined(self, returned: Any, num_samples: int | None = None) -> Loss:
        """Return the loss and the metrics of the micro-batch. `returned` is what training_step returned.

        With `num_samples=0` the loss counts nothing.

        The metric `NAME_loss` is the mean of the losses of that name. The loss is the one that was returned, or the sum of
        all of these means.
        """
        metrics: dict[str, Any] = {f"{name}_loss": _mean(losses) for name, losses in self._losses.items()}
        loss, more = _split(returned)
        for name in more:
            if name in metrics:
                raise ConfigError(
                    f"training_step returned {name!r}, which update() reports already: choose another name"
                )
        check_names(more)
        found = as_loss(loss) if loss is not None else self._sum()
        if num_samples == 0 and found.count is not None:
            found = Loss(torch.zeros_like(found.value.detach()), 0.0)
        return Loss(found.value, found.count, metrics={**metrics, **more})

    def _sum(self) -> Loss:
        means = [_mean(losses) for losses in self._losses.values()]
        if not means:
            return Loss(torch.zeros(()), 0.0)  # nothing to report
        if len(means) == 1:
            return as_loss(means[0])
        for name, losses in self._losses.items():
            if losses[0].count is not None:
                raise ConfigError(
                    f"the loss of update({name!r}, ...) is not a mean over samples, so that it cannot be added to the other"
                    " losses: return {'loss': ...} from training_step"
                )
        return Loss(torch.stack([mean.double() for mean in means]).sum(), None)


def _mean(losses: list[Loss]) -> Any:
    """Return the mean of losses of one form, as a scalar or as a pair (sum, count)."""
    if losses[0].count is None:
        return losses[0].value if len(losses) == 1 else torch.stack([loss.value for loss in losses]).mean()
    return sum(loss.value for loss in losses), sum(loss.count for loss in losses if loss.count is not None)


def _split(returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return (loss or None, metrics) of what a training_step returned."""
    if not isinstance(returned, Mapping):
        return returned, {}
    return returned.get("loss"), {name: value for name, value in returned.items() if name != "loss"}


class SeveralObjective(Objective):
    """Call a `training_step(models, batch, update)`."""

    def __call__(self, model: Any, batch: Any, num_items: torch.Tensor | None = None) -> Loss:
        """Return the losses of `batch` without making updates, as in evaluation."""
        losses = StepLosses()
        returned = self.run(model, batch, lambda name, value: losses.add(name, as_loss(value)))
        return losses.joined(returned)

    def run(self, models: Any, batch: Any, update: Callable[[str, Any], None]) -> Any:
        """Return what training_step returns."""
        assert self._training_step is not None
        return self._training_step(models, batch, update)
