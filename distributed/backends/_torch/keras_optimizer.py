"""Let a Keras optimizer be used like a torch optimizer, with the same gradients, parameter groups and rates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Scope = Callable[[], contextlib.AbstractContextManager[None]]


class KerasOptimizer(torch.optim.Optimizer):
    """Update one parameter group with the optimizer `keras` at the group's rate."""

    def __init__(self, keras: Any, variables: list[Any], rate: float, scope: Scope) -> None:
        super().__init__([variable.value for variable in variables], {"lr": rate})
        self.keras, self._variables, self._scope = keras, variables, scope

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update with the gradients that are present."""
        pairs = [(v.value.grad, v) for v in self._variables if v.value.grad is not None]
        if pairs:
            with self._scope(), self._at_rate():
                self.keras.apply(*map(list, zip(*pairs, strict=True)))

    @contextlib.contextmanager
    def _at_rate(self) -> Iterator[None]:
        """Make Keras use the group's rate in this block. During warm-up it is lower than the optimizer's own rate."""
        attributes = vars(self.keras)  # bypass Keras's __setattr__, which tracks attributes
        own = attributes["_learning_rate"]
        attributes["_learning_rate"] = lambda: self.param_groups[0]["lr"]
        try:
            yield
        finally:
            attributes["_learning_rate"] = own


class LearningRateSchedule:
    """Step a Keras schedule, which computes the rate from the number of updates."""

    counts_updates = True  # no notice about when it steps is needed

    def __init__(self, schedule: Any, optimizer: KerasOptimizer, factor: float, scope: Scope) -> None:
        self._schedule, self._optimizer, self._factor, self._scope = schedule, optimizer, factor, scope
        self.kind = type(schedule).__name__

    def step(self) -> None:
        """Set the rate of the next update."""
        with self._scope():
            rate = self._factor * float(self._schedule(self._optimizer.keras.iterations))
        self._optimizer.param_groups[0]["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because the optimizer counts the updates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the rate for the optimizer's restored count. Load the optimizer first."""
        self.step()
