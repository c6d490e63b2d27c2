"""Histograms of weights and gradients for TensorBoard, once per epoch or every few updates.

Every rank takes part in the computation, because some engines split tensors over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distributed.callbacks import Callback, GradientHistogram
from distributed.loggers.base import LoggedFit
from distributed.state import StepResult, TrainState

if TYPE_CHECKING:
    from distributed.loggers.tensorboard import TensorBoard

_BUCKETS = 64
Range = tuple[float, float]
Sums = tuple[Any, float, float]  # counts by bucket, sum, sum of squares


class Histograms(Callback):
    """Write the distribution of every weight and of the newest update's gradients. Only the main process has a `writer`."""

    def __init__(self, fit: LoggedFit, writer: TensorBoard | None) -> None:
        self._backend, self._writer = fit.backend, writer
        self._asking = [each for each in fit.callbacks if isinstance(each, GradientHistogram)]
        of_epochs = [each for each in self._asking if each.every_n_steps is None]
        self._is_each_epoch = fit.merged.config.tensorboard_histograms or bool(of_epochs)

    def on_train_start(self, state: TrainState) -> None:
        self._backend.observer.keep_gradients()

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self._is_due(state):
            self._compute(state)

    def on_epoch_end(self, state: TrainState, metrics: Mapping[str, float]) -> None:
        if self._is_each_epoch and not self._is_due(state):
            self._compute(state)

    def _is_due(self, state: TrainState) -> bool:
        return any(each.is_due(state.step) for each in self._asking)

    def _compute(self, state: TrainState) -> None:
        """Compute the histograms. If tensors are split over the ranks, this is a collective. Every rank must call it."""
        is_cut = self._backend.observer.cuts_weights and self._backend.world.context.world_size > 1
        if self._writer is None and not is_cut:
            return
        mine = {name: _finite(values) for name, values in self._backend.observer.local_values()}
        ranges = {name: (float(v.min()), float(v.max())) for name, v in mine.items() if v.size}
        if is_cut:
            ranges = _widest(self._backend.world.gather(ranges))
        sums = {name: _sums(values, ranges[name]) for name, values in mine.items() if name in ranges}
        if is_cut:
            sums = _added(self._backend.world.gather(sums))
        if self._writer is not None:
            self._writer.write([_value(name, ranges[name], each) for name, each in sorted(sums.items())], state.step)


def _finite(values: Any) -> Any:
    """Return the values without NaN and infinity, which belong to no bucket."""
    import numpy

    is_finite = numpy.isfinite(values)
    return values if is_finite.all() else values[is_finite]


def _widest(parts: list[dict[str, Range]]) -> dict[str, Range]:
    ranges: dict[str, Range] = {}
    for part in parts:
        for name, (low, high) in part.items():
            before = ranges.get(name, (low, high))
            ranges[name] = min(before[0], low), max(before[1], high)
    return ranges


def _sums(values: Any, limits: Range) -> Sums:
    import numpy

    wide = values.astype(numpy.float64, copy=False)  # numpy gives the edges of buckets the type of the values
    counts, _ = numpy.histogram(wide, _BUCKETS, _cuttable(limits))
    return counts.tolist(), float(wide.sum()), float(wide @ wide)


def _cuttable(limits: Range) -> Range:
    """Return the limits between which the buckets lie.

    The limits are widened if they are so close that two edges of buckets would be the same floating-point number.
    """
    low, high = limits
    if low == high:  # as numpy.histogram does
        low, high = low - 0.5, high + 0.5
    missing = 2 * _BUCKETS * max(math.ulp(low), math.ulp(high)) - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def _added(parts: list[dict[str, Sums]]) -> dict[str, Sums]:
    sums: dict[str, Sums] = {}
    for part in parts:
        for name, (counts, total, squares) in part.items():
            before = sums.get(name, ([0] * _BUCKETS, 0.0, 0.0))
            added = [a + b for a, b in zip(before[0], counts, strict=True)]
            sums[name] = added, before[1] + total, before[2] + squares
    return sums


def _value(tag: str, limits: Range, sums: Sums) -> Any:
    import numpy
    from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

    counts, total, squares = sums
    edges = numpy.histogram_bin_edges([], _BUCKETS, _cuttable(limits))[1:]
    histogram = HistogramProto(
        min=limits[0], max=limits[1], num=sum(counts), sum=total, sum_squares=squares, bucket_limit=edges, bucket=counts
    )
    return Summary.Value(tag=tag, histo=histogram)
