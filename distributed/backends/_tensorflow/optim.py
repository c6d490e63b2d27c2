"""Build a Keras optimizer and set its learning rate: the user's rate or schedule, scaled with the batch size, and a
warm-up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import tensorflow as tf

from distributed.backends._keras.files import fixed_rate
from distributed.backends._keras.models import chosen_optimizer, schedule_kind, set_schedule
from distributed.backends.keras_kinds import is_optimizer, is_schedule
from distributed.config.merging import MergedConfig
from distributed.config.optimization import RateCurve
from distributed.config.plan import BatchPlan
from distributed.errors import CheckpointError, ConfigError


def build_optimizer(
    optimizer_or_factory: Any,
    scheduler: Any,
    model: Any,
    source: Any,
    merged: MergedConfig,
    notice: Callable[[str], None],
) -> Any:
    """Return a built optimizer: the user's, the one that `source` (the user's own model) was compiled with, or AdamW.

    An optimizer is made again with the same settings if it was built for `source` and `model` is another model, or if
    it was made outside of the strategy's scope.
    """
    if optimizer_or_factory is None and source.compiled:
        optimizer_or_factory = source.optimizer
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    is_outside = (
        strategy is not None and getattr(optimizer_or_factory, "_distribution_strategy", strategy) is not strategy
    )
    if is_optimizer(optimizer_or_factory) and ((optimizer_or_factory.built and source is not model) or is_outside):
        optimizer_or_factory = type(optimizer_or_factory).from_config(optimizer_or_factory.get_config())
    optimizer = chosen_optimizer(optimizer_or_factory, model, merged.config.learning_rate, notice)
    if scheduler is not None and not isinstance(scheduler, RateCurve):
        set_schedule(optimizer, scheduler)
    if merged.config.dtype == "float64":
        _widen(optimizer)
        if is_schedule(optimizer._learning_rate):
            _widen(optimizer._learning_rate)
    return optimizer


def _widen(holder: Any) -> None:
    """Replace Python floats by float64 numbers.

    Workaround (TensorFlow 2.21, tensorflow/tensorflow#57779; may go when Keras converts Python numbers to the wanted
    type directly): TensorFlow makes a float32 of a Python float, even when it casts it to float64.
    """
    for name, value in vars(holder).items():
        if type(value) is float:
            vars(holder)[name] = numpy.float64(value)


class Rates:
    """Set the learning rate of each update: the optimizer's or its schedule's rate, scaled, and lower during
    warm-up."""

    def __init__(
        self,
        optimizer: Any,
        merged: MergedConfig,
        batch: BatchPlan,
        notice: Callable[[str], None],
        curve: RateCurve | None = None,
    ) -> None:
        """Prepare the rates. `curve` is the schedule that settings name, or None."""
        self._optimizer, self._merged, self._curve = optimizer, merged, curve
        self._num_made = 0  # updates made, which the curve counts
        self._warmup = merged.config.warmup_steps
        self._schedule = optimizer._learning_rate if fixed_rate(optimizer) is None else None
        self.has_schedule = self._schedule is not None or curve is not None
        if self._schedule is not None and curve is not None:
            raise ConfigError(
                f"scheduler={curve.kind!r} cannot replace {type(self._schedule).__name__} of the optimizer: set optimizer too,"
                " or give the optimizer a number as learning_rate"
            )
        if self._schedule is not None:
            self._check_schedule()
        factor = _scaling(merged.config.lr_scaling, batch)
        full = 1.0 if self._schedule is not None else self._given_rate(notice)
        self._full = full * factor  # if there is a schedule, the factor of its rates
        if factor != 1.0:
            what = "the schedule's rates" if self._schedule is not None else f"learning rate {full:g}"
            notice(f"lr_scaling={merged.config.lr_scaling}: {what} x {factor:g} = {self._full:g}")
        self._put_last = self._full
        # Rate of the next update, or factor of the schedule's rate. Keras's own variable is float32, with seven digits.
        self._rate = tf.Variable(self._full, dtype=tf.float64)
        self._put(self._full)

    @contextlib.contextmanager
    def updating(self) -> Iterator[Callable[[list[Any], list[Any]], None]]:
        """Yield the function that makes one update at the current rate. The function is traced once for each
        replica."""
        attributes = vars(self._optimizer)  # bypasses Keras's __setattr__, which tracks attributes
        own = attributes["_learning_rate"]
        attributes["_learning_rate"] = self._current
        # Workaround (Keras 3.15, no upstream issue known; may go when `apply` takes gradients that are summed): Keras
        # would sum over the replicas again.
        attributes["_all_reduce_sum_gradients"] = list
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
        """Return the `learning_rate` that the user set, or the optimizer's own rate, which Keras keeps as float32."""
        before, learning_rate = float(fixed_rate(self._optimizer) or 0.0), self._merged.config.learning_rate
        if not self._merged.is_given("learning_rate"):
            return before
        if not _equal(before, learning_rate):
            notice(f"learning_rate={learning_rate:g} replaces the optimizer's {before:g}")
        return learning_rate

    def before_update(self, step: int) -> None:
        """Set the rate of the update that follows `step` updates. A Keras schedule counts the updates itself."""
        if (self._warmup or self._curve) and (rate := self._warm(step)) != self._put_last:
            self._put(rate)  # also after the warm-up, whose last updates may have been skipped
        self._num_made += 1

    def _warm(self, step: int) -> float:
        factor = 1.0 if self._curve is None else self._curve.factor(self._num_made, self._full)
        return self._merged.config.warm_rate(self._full * factor, step)

    def _put(self, rate: float) -> None:
        self._put_last = rate
        self._rate.assign(rate)
        if self._schedule is None:
            self._optimizer.learning_rate = rate  # for code that reads the optimizer's rate

    def at(self, step: int) -> float:
        """Return the rate of the update that follows `step` updates."""
        of_schedule = 1.0 if self._schedule is None else float(self._schedule(self._optimizer._iterations))
        return self._warm(step) * of_schedule

    @property
    def fixed(self) -> float | None:
        """The rate without rounding to float32, or None if a schedule computes it."""
        return self._full if self._schedule is None else None

    def state(self) -> dict[str, Any]:
        """Return the state that `load` takes, as JSON."""
        curve = self._curve
        content = None if curve is None else {"length": curve.length, "last_epoch": self._num_made}
        return {"learning_rate": self._full, "schedule": self._kind(), "scheduler": content}

    def load(self, state: Mapping[str, Any], notice: Callable[[str], None]) -> None:
        """Check that `state` fits this run, and set this run's rate, which replaces the stored one. Restore the
        optimizer first."""
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
        content = state.get("scheduler")
        if self._curve is not None and content:
            self._num_made = int(content["last_epoch"])
            if text := self._curve.length_notice(content, self._curve.length):
                notice(text)
            self._curve = self._curve.of_length(int(content["length"]))
        self._put(self._full)

    def _kind(self) -> str | None:
        if self._curve is not None:
            return self._curve.kind
        return None if self._schedule is None else type(self._schedule).__name__


def _scaling(kind: str, batch: BatchPlan) -> float:
    return {"none": 1.0, "linear": batch.lr_ratio, "sqrt": float(batch.lr_ratio**0.5)}[kind]


def _equal(one: float, other: float) -> bool:
    """Return True if both rates are equal up to the precision of float32, in which Keras keeps a rate."""
    return abs(one - other) <= 1e-6 * abs(other)
