"""Learning rate of a Keras optimizer: the rate that the user set, its scaling, its schedule, and a warm-up before both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import tensorflow as tf

from distributed.backends._keras.files import fixed_rate
from distributed.backends._keras.models import chosen_optimizer, is_optimizer, is_schedule, schedule_kind, set_schedule
from distributed.config.merging import MergedConfig
from distributed.config.plan import BatchPlan
from distributed.errors import CheckpointError, ConfigError


def build_optimizer(optimizer_or_factory: Any, scheduler: Any, model: Any, source: Any, merged: MergedConfig) -> Any:
    """Return a built optimizer: the user's, the one that `source` (the model as given) was compiled with, or AdamW.

    An optimizer is made again with the same settings if it was built for `source` and another model was made of that,
    or if it was made outside of the strategy's scope.
    """
    if optimizer_or_factory is None and source.compiled:
        optimizer_or_factory = source.optimizer
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    is_outside = (
        strategy is not None and getattr(optimizer_or_factory, "_distribution_strategy", strategy) is not strategy
    )
    if is_optimizer(optimizer_or_factory) and ((optimizer_or_factory.built and source is not model) or is_outside):
        optimizer_or_factory = type(optimizer_or_factory).from_config(optimizer_or_factory.get_config())
    optimizer = chosen_optimizer(optimizer_or_factory, model, merged.config.learning_rate)
    if scheduler is not None:
        set_schedule(optimizer, scheduler)
    if merged.config.dtype == "float64":
        _widen(optimizer)
        if is_schedule(optimizer._learning_rate):
            _widen(optimizer._learning_rate)
    return optimizer


def _widen(holder: Any) -> None:
    """Replace Python floats by float64 numbers. TensorFlow makes a float32 of a Python float, even when it casts it
    to float64."""
    for name, value in vars(holder).items():
        if type(value) is float:
            vars(holder)[name] = numpy.float64(value)


class Rates:
    """Set the rate of each update: the optimizer's own or its schedule's, scaled, and lower during the warm-up."""

    def __init__(self, optimizer: Any, merged: MergedConfig, batch: BatchPlan, notice: Callable[[str], None]) -> None:
        self._optimizer, self._merged = optimizer, merged
        self._warmup = merged.config.warmup_steps
        self._schedule = optimizer._learning_rate if fixed_rate(optimizer) is None else None
        self.has_schedule = self._schedule is not None
        if self._schedule is not None:
            self._check_schedule()
        factor = _scaling(merged.config.lr_scaling, batch)
        full = 1.0 if self._schedule is not None else self._given_rate(notice)
        self._full = full * factor  # with a schedule: the factor of its rates
        if factor != 1.0:
            what = "the schedule's rates" if self._schedule is not None else f"learning rate {full:g}"
            notice(f"lr_scaling={merged.config.lr_scaling}: {what} x {factor:g} = {self._full:g}")
        self._put_last = self._full
        # Rate of the next update, or factor of the schedule's rate. Keras's own variable has seven digits.
        self._rate = tf.Variable(self._full, dtype=tf.float64)
        self._put(self._full)

    @contextlib.contextmanager
    def updating(self) -> Iterator[Callable[[list[Any], list[Any]], None]]:
        """Yield the function that makes one update at the present rate. It is traced once, on each replica."""
        attributes = vars(self._optimizer)  # assign without Keras's __setattr__, which would track the value
        own = attributes["_learning_rate"]
        attributes["_learning_rate"] = self._current
        attributes["_all_reduce_sum_gradients"] = list  # Keras would sum over the replicas again
        try:
            yield self._optimizer.apply
        finally:
            attributes["_learning_rate"] = own
            del attributes["_all_reduce_sum_gradients"]

    def _current(self) -> Any:
        if self._schedule is None:
            return self._rate
        rate = self._schedule(self._optimizer._iterations)
        return rate * tf.cast(self._rate, rate.dtype)

    def _check_schedule(self) -> None:
        if not is_schedule(self._schedule):
            raise ConfigError("the optimizer's learning_rate is a function: give a number or a LearningRateSchedule")
        if self._merged.is_given("learning_rate"):
            raise ConfigError(
                f"learning_rate={self._merged.config.learning_rate:g} cannot replace the rates of"
                f" {type(self._schedule).__name__}: drop it, or set them in the schedule"
            )

    def _given_rate(self, notice: Callable[[str], None]) -> float:
        """Return the rate to start from. Keras keeps it with seven digits."""
        before, learning_rate = float(fixed_rate(self._optimizer) or 0.0), self._merged.config.learning_rate
        if not self._merged.is_given("learning_rate"):
            return before
        if not _equal(before, learning_rate):
            notice(f"learning_rate={learning_rate:g} replaces the optimizer's {before:g}")
        return learning_rate

    def before_update(self, step: int) -> None:
        """Set the rate of the update after `step` others. A schedule counts updates itself."""
        if self._warmup and (rate := self._warm(step)) != self._put_last:
            self._put(rate)  # also after the warm-up, because its last updates may have been skipped

    def _warm(self, step: int) -> float:
        return self._merged.config.warm_rate(self._full, step)

    def _put(self, rate: float) -> None:
        self._put_last = rate
        self._rate.assign(rate)
        if self._schedule is None:
            self._optimizer.learning_rate = rate  # for code that reads the optimizer's rate

    def at(self, step: int) -> float:
        """Return the rate of the update after `step` others."""
        of_schedule = 1.0 if self._schedule is None else float(self._schedule(self._optimizer._iterations))
        return self._warm(step) * of_schedule

    @property
    def fixed(self) -> float | None:
        """Rate with all its digits, or None if a schedule computes it."""
        return self._full if self._schedule is None else None

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, as JSON."""
        return {"learning_rate": self._full, "schedule": self._kind(), "scheduler": None}

    def load(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        """Restore `state`, after the optimizer has restored its own. This command's `learning_rate` takes
        precedence."""
        here = self._kind()
        there = schedule_kind(state.get("schedule"), here)
        if here and there and here != there:
            raise CheckpointError(
                f"the schedule is {here}, the checkpoint holds {there}: use {there} or start without the checkpoint"
            )
        if here != there:
            notice(
                f"the checkpoint's schedule is {there or 'none'}, and this run continues with its own, {here or 'none'}"
            )
        before = float(state.get("learning_rate", self._full))
        if here is None and not _equal(before, self._full):
            notice(f"learning_rate={self._full:g} replaces the checkpoint's {before:g}")
        self._put(self._full)

    def _kind(self) -> str | None:
        return None if self._schedule is None else type(self._schedule).__name__


def _scaling(kind: str, batch: BatchPlan) -> float:
    ratio = batch.global_batch_size / batch.batch_size
    return {"none": 1.0, "linear": ratio, "sqrt": float(ratio**0.5)}[kind]


def _equal(one: float, other: float) -> bool:
    """Return True if both rates are equal in float32, in which Keras keeps a rate."""
    return abs(one - other) <= 1e-6 * abs(other)
