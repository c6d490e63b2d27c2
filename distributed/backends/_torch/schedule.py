"""Set the learning rates of a run: the user's schedule, the warm-up before it, and their state after a resume."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from distributed.backends._keras.models import schedule_kind
from distributed.backends._torch import named_optimizers, optim, optimizer_state
from distributed.backends._torch.named_optimizers import CurveSchedule
from distributed.config.merging import MergedConfig
from distributed.errors import CheckpointError
from distributed.metrics.monitor import unknown_metric


class Schedule:
    """Set the rates of `optimizer` with the user's `scheduler`, which counts updates or epochs.

    With None the rates are constant.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, merged: MergedConfig) -> None:
        self._scheduler, self._optimizer, self._merged = scheduler, optimizer, merged
        self._is_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self._is_of_keras = getattr(scheduler, "counts_updates", False)
        # Whether there is a schedule that counts updates or epochs, see `scheduler_interval`.
        self.counts = scheduler is not None and not self._is_plateau
        self.follows_updates = self.counts and merged.config.scheduler_interval == "step"
        self._is_new = True
        self._full_rates = [optim.full_rate(group) for group in optimizer.param_groups]
        self._full_rate = self._full_rates[0]

    def notice(self) -> str | None:
        """Return a notice about when the schedule steps, or None if the settings state it or there is no schedule."""
        if (
            self._is_of_keras
            or isinstance(self._scheduler, CurveSchedule)
            or not self.follows_updates
            or self._merged.is_given("scheduler_interval")
        ):
            return None
        kind = type(self._scheduler).__name__
        return f"warning: {kind} steps after every update: set scheduler_interval='epoch' if it counts epochs, or 'step' to confirm"

    def rates(self, step: int) -> list[float]:
        """Return the rate of each parameter group for the update after `step` updates."""
        return [self._merged.config.warm_rate(float(group["lr"]), step) for group in self._optimizer.param_groups]

    @contextlib.contextmanager
    def warming_up(self, step: int) -> Iterator[None]:
        """Apply the warm-up rates of update `step` in this block.

        Restore the full rates afterwards, because the schedule computes the next rates from them.
        """
        full = [float(group["lr"]) for group in self._optimizer.param_groups]
        optim.set_rates(self._optimizer, self.rates(step))
        yield
        optim.set_rates(self._optimizer, full)

    def step(self, *metric: float) -> None:
        """Step the schedule by one update or one epoch."""
        if not self._is_new:
            self._scheduler.step(*metric)
            return
        self._is_new = False
        # Workaround (torch 2.13, no upstream issue known; may go when torch does not warn about an unpickled schedule): the
        # first step of such a schedule warns that `optimizer.step` was overridden.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Seems like `optimizer.step", UserWarning)
            self._scheduler.step(*metric)

    def step_outside(self, metrics: Mapping[str, float] | None, *, is_epoch_end: bool) -> None:
        """Step a schedule that counts epochs, if `is_epoch_end`, or one that watches a metric, if there are `metrics`."""
        if self._scheduler is None or self.follows_updates:
            return
        if not self._is_plateau:
            if is_epoch_end:
                self.step()
            return
        if metrics is None:
            return
        name = self._merged.config.monitor
        if name not in metrics:
            if self._merged.is_given("monitor"):
                # The metric was reported before, so it is not reported in every epoch.
                if self._scheduler.last_epoch > 0:
                    return
                raise unknown_metric("monitor", name, metrics)
            name = "loss"
        self.step(metrics[name])

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes, as JSON."""
        content = None if self._scheduler is None else optimizer_state.scheduler_state(self._scheduler)
        rates = {"learning_rate": self._full_rate, "learning_rates": self._full_rates}
        return {**rates, "schedule": self._kind(), "scheduler": content}

    def load(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        """Restore `state`.

        Restore the optimizer first. The `learning_rate` of this run replaces that of the checkpoint.
        """
        content, here = state.get("scheduler"), self._kind()
        there = state.get("schedule", here if content else None)  # a checkpoint without the name is accepted
        there = schedule_kind(there, here) if self._is_of_keras else there
        length = self._scheduler.curve.length if isinstance(self._scheduler, CurveSchedule) else 0
        if here and there and here != there:
            raise CheckpointError(
                f"the schedule is {here}, the checkpoint holds {there}: use {there} or start without the checkpoint"
            )
        if here and there:
            optimizer_state.load_scheduler_state(self._scheduler, content or {})
            if isinstance(self._scheduler, CurveSchedule) and (
                text := self._scheduler.curve.length_notice(content or {}, length)
            ):
                notice(text)
        elif here:
            notice(f"the checkpoint has no schedule: {here} starts from its beginning")
            if isinstance(rates := getattr(self._scheduler, "_last_lr", None), list):
                optim.set_rates(self._optimizer, rates)  # the optimizer has those of the checkpoint
                return
        elif there:
            notice(
                f"the checkpoint has the schedule {there}, which this run does not have: the learning rate stays at its last value"
            )
        if named_optimizers.is_named(self._optimizer):
            self._load_rates(state, notice)
        elif not self._is_of_keras:  # Keras computes the rate from the number of updates
            self._load_rate(state, notice)
        if isinstance(self._scheduler, CurveSchedule):
            self._scheduler.set_rates()

    def _load_rates(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        """Let the rate of each parameter group in the settings replace that of the checkpoint. What a schedule or the user's code has
        multiplied it by stays."""
        groups, wanted = self._optimizer.param_groups, self._full_rates
        stored = self._stored_rates(state)
        if stored == wanted:
            return
        for group, before, now in zip(groups, stored, wanted, strict=True):
            group["lr"] = float(group["lr"]) * (now / before)
            if "initial_lr" in group:
                group["initial_lr"] = now
        if hasattr(self._scheduler, "base_lrs"):
            self._scheduler.base_lrs = list(wanted)
        notice(
            f"the rates of this run's settings, {', '.join(f'{rate:g}' for rate in dict.fromkeys(wanted))}, replace the checkpoint's,"
            f" {', '.join(f'{rate:g}' for rate in dict.fromkeys(stored))}"
        )

    def _stored_rates(self, state: Mapping[str, Any]) -> list[float]:
        """Return the rates with which the run of the checkpoint began."""
        groups, rates = self._optimizer.param_groups, state.get("learning_rates")  # an old checkpoint has no rates
        if rates is not None and len(rates) == len(groups):
            return [float(rate) for rate in rates]
        if not self._is_plateau:
            return [optim.full_rate(group) for group in groups]
        factor = float(state.get("learning_rate", self._full_rate)) / self._full_rate
        return [rate * factor for rate in self._full_rates]

    def _load_rate(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        before, now = float(state.get("learning_rate", self._full_rate)), self._full_rate
        if before != now:
            optim.change_rates(self._optimizer, self._scheduler, lambda rate: rate * (now / before))
            notice(f"learning_rate={now:g} replaces the checkpoint's {before:g}")

    def _kind(self) -> str | None:
        if self._scheduler is None:
            return None
        return getattr(self._scheduler, "kind", type(self._scheduler).__name__)
