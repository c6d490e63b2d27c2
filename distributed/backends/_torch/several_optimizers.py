"""Hold the optimizers, schedules and loss scales of several models in the place of those of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from distributed.backends._torch.by_name import ByName
from distributed.backends._torch.precision import Precision
from distributed.backends._torch.schedule import Schedule
from distributed.errors import TrainingError


class _States(MutableMapping[torch.Tensor, Any]):
    """Show the states of several optimizers as one mapping by parameter."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers.values())
        self._owners = {
            parameter: each for each in self._optimizers for group in each.param_groups for parameter in group["params"]
        }

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        return self._owners[parameter].state[parameter]

    def __setitem__(self, parameter: torch.Tensor, slots: Any) -> None:
        self._owners[parameter].state[parameter] = slots

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._owners[parameter].state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for each in self._optimizers for parameter in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._optimizers)

    def clear(self) -> None:
        """Drop the states of all optimizers."""
        for each in self._optimizers:
            each.state.clear()


class SeveralOptimizers(ByName[torch.optim.Optimizer], torch.optim.Optimizer):
    """Hold an optimizer for each model by name, as a mapping. A checkpoint stores their parameter groups and states together.

    The parameter groups and the states are those of the optimizers themselves, not copies.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for each in optimizers.values() for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {"lr": groups[0]["lr"]})
        self.param_groups = groups
        self._by_name = dict(optimizers)
        self.state: Any = _States(optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise TrainingError. Each optimizer makes its own updates."""
        raise TrainingError("several optimizers make no update together: call update(name, loss) in training_step")


class SeveralSchedules:
    """Hold the schedule of each optimizer by name. They count update batches, like the steps of a run."""

    def __init__(self, schedules: Mapping[str, Schedule]) -> None:
        self._schedules = dict(schedules)

    def __getitem__(self, name: str) -> Schedule:
        return self._schedules[name]

    @property
    def counts(self) -> bool:
        """Return whether a schedule counts updates or epochs, see `scheduler_interval`."""
        return any(each.counts for each in self._schedules.values())

    def notice(self) -> str | None:
        """Return a notice about when the schedules step, or None."""
        return next((text for each in self._schedules.values() if (text := each.notice())), None)

    def step_outside(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        """Step the schedules that count epochs, if `is_epoch_end`, and those that watch a metric, if there are `metrics`."""
        for each in self._schedules.values():
            each.step_outside(metrics, is_epoch_end=is_epoch_end)

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes, as JSON."""
        return {"schedules": {name: each.state() for name, each in self._schedules.items()}}

    def load(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        """Restore `state`. Restore the optimizers first."""
        stored = state.get("schedules") or {}
        for name, each in self._schedules.items():
            each.load(stored.get(name) or {}, named_notice(name, notice))


class SeveralPrecisions(Precision):
    """Hold the mixed precision of each trained model by name. Each has a loss scale of its own."""

    def __init__(self, members: Mapping[str, Precision]) -> None:
        self._members = dict(members)
        self.autocast = next(iter(members.values())).autocast
        self.scaler = None

    def __getitem__(self, name: str) -> Precision:
        return self._members[name]

    def state(self) -> dict[str, Any] | None:
        """Return the state that `load` takes, as JSON."""
        states = {name: each.state() for name, each in self._members.items()}
        return states if any(states.values()) else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore `state`, if there is one."""
        for name, each in self._members.items():
            each.load((state or {}).get(name))


def named_notice(name: str, notice: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that calls `notice` with the name of the model before the text."""
    return lambda text: notice(f"{name}: {text}")
