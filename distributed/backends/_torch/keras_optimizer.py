"""A Keras optimizer where the step expects one of torch's: the same gradients, groups and rates drive it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Scope = Callable[[], contextlib.AbstractContextManager[None]]


class KerasOptimizer(torch.optim.Optimizer):
    """One group of parameters, updated by `keras` at the group's rate."""

    def __init__(self, keras: Any, variables: list[Any], rate: float, scope: Scope) -> None:
        super().__init__([variable.value for variable in variables], {"lr": rate})
        self.keras, self._variables, self._scope = keras, variables, scope

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update with the gradients that are there."""
        pairs = [(v.value.grad, v) for v in self._variables if v.value.grad is not None]
        if pairs:
            with self._scope(), self._at_rate():
                self.keras.apply(*map(list, zip(*pairs, strict=True)))

    @contextlib.contextmanager
    def _at_rate(self) -> Iterator[None]:
        """The group's rate, which may be lower than the optimizer's own for a warm-up, is the one that Keras asks for."""
        attributes = vars(self.keras)  # Keras tracks what is set through its own __setattr__
        own = attributes["_learning_rate"]
        attributes["_learning_rate"] = lambda: self.param_groups[0]["lr"]
        try:
            yield
        finally:
            attributes["_learning_rate"] = own


class LearningRateSchedule:
    """One of Keras, which gives a rate for the number of updates, as a schedule that steps."""

    counts_updates = True  # there is nothing to say about when it steps

    def __init__(self, schedule: Any, optimizer: KerasOptimizer, factor: float, scope: Scope) -> None:
        self._schedule, self._optimizer, self._factor, self._scope = schedule, optimizer, factor, scope
        self.kind = type(schedule).__name__

    def step(self) -> None:
        """Set the rate of the next update."""
        with self._scope():
            rate = self._factor * float(self._schedule(self._optimizer.keras.iterations))
        self._optimizer.param_groups[0]["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the optimizer counts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The optimizer has taken up its count before."""
        self.step()
