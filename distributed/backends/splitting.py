"""Is a metric function a mean over samples? Asked once, in the first evaluation, by cutting a batch. No framework."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from distributed.backends.parts import cut, has_rows

Value = Callable[
    [Callable[..., Any], Any, Any, int], tuple[float, float]
]  # (function, outputs, targets, samples) -> (sum, count)
Reduce = Callable[[Mapping[Any, float]], dict[Any, float]]

# Means agree up to rounding: 16-bit floats are widened first, a mean over a batch in float32 is exact to about 1e-6.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
# Of batches whose parts had other values than the whole, and the same mean: samples, or batches. A metric with few values, as F1
# of four samples, agrees by chance now and then.
_ENOUGH_SAMPLES, _ENOUGH_BATCHES = 64.0, 4.0
# What functions raise for a part that they do not take, as scikit-learn for one class alone.
_REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


class Splitting:
    """The functions of which it is not known yet, and what was found of the others.

    Until it is known a function is computed over all samples, which is right for a mean, too.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], notice: Callable[[str], None]) -> None:
        self._unknown, self._notice = dict(functions), notice
        self._samples = dict.fromkeys(functions, 0.0)
        self._batches = dict.fromkeys(functions, 0.0)
        self.not_means: set[str] = set()

    @property
    def unknown(self) -> list[str]:
        """The names of which it is not known yet."""
        return list(self._unknown)

    def look(
        self, number: int, outputs: Any, targets: Any, num_samples: int, value: Value, reduce: Reduce
    ) -> dict[str, bool]:
        """Cut the batch `number` of an evaluation, counted from 1, and compare. Returns name -> whether it is a mean, for what
        has become known. A collective for the 1st, 2nd, 4th, 8th, ... batch while something is unknown."""
        if not self._unknown or number & (number - 1):
            return {}
        votes: dict[tuple[str, str], float] = {}
        for name, function in self._unknown.items():
            found = vote(function, outputs, targets, num_samples, value)
            votes[name, "samples"] = num_samples * float(found is True)
            votes |= {(name, "mean"): float(found is True), (name, "other"): float(found is False)}
        return self._decide(reduce(votes))

    def _decide(self, votes: Mapping[tuple[str, str], float]) -> dict[str, bool]:
        known: dict[str, bool] = {}
        for name in self.unknown:
            self._samples[name] += votes[name, "samples"]
            self._batches[name] += votes[name, "mean"]
            if votes[name, "other"]:
                known |= self.refute(name)
            elif self._samples[name] >= _ENOUGH_SAMPLES or self._batches[name] >= _ENOUGH_BATCHES:
                known[name] = True
        self.settle(known)
        return known

    def refute(self, name: str) -> dict[str, bool]:
        """Take up that `name` is no mean, and say it. Returns {name: False}."""
        self._notice(_text(name, self._unknown[name]))
        self.settle({name: False})
        return {name: False}

    def settle(self, known: Mapping[str, bool]) -> None:
        """Take up what is known, from a checkpoint too."""
        for name, is_mean in known.items():
            if self._unknown.pop(name, None) is not None and not is_mean:
                self.not_means.add(name)

    @property
    def known(self) -> dict[str, bool]:
        """name -> whether it is a mean, as JSON."""
        return {name: name not in self.not_means for name in self._samples if name not in self._unknown}


def vote(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value) -> bool | None:
    """Whether the mean over three parts of a batch is the value of the whole; None where that proves nothing, because the
    batch is too small, or all parts have the value of the whole."""
    if num_samples < 2 or not (has_rows(outputs, num_samples) and has_rows(targets, num_samples)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that are too small to be measured
        whole = value(function, outputs, targets, num_samples)
        parts: list[tuple[float, float]] = []
        with contextlib.suppress(*_REFUSES):
            for begin, end in _places(num_samples):
                part = cut(outputs, begin, end, num_samples), cut(targets, begin, end, num_samples)
                parts.append(value(function, *part, end - begin))
    if len(parts) < len(_places(num_samples)):
        return False
    total = sum(part[0] for part in parts if part[1]), sum(part[1] for part in parts)
    if not near(_mean(total), _mean(whole)):
        return False
    return None if all(near(_mean(part), _mean(whole)) for part in parts) else True


def _places(num_samples: int) -> list[tuple[int, int]]:
    """Three parts of different sizes, or fewer: equal ones agree by chance where a metric has few values."""
    ends = sorted({0, num_samples // 2, num_samples // 2 + num_samples // 3, num_samples})
    return list(itertools.pairwise(ends))


def _mean(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else math.nan


def near(one: float, other: float) -> bool:
    """Whether two values are the same but for rounding; NaN is NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= _RELATIVE * max(abs(one), abs(other)) + _ABSOLUTE


def _text(name: str, function: Callable[..., Any]) -> str:
    called = getattr(function, "__name__", type(function).__name__)
    return (
        f"metric {name!r} gives another value when its batch is split, so a mean over batches is not its value: it is computed"
        f" over all samples from now on. To say so yourself: metrics={{{name!r}: distributed.over_all({called})}}"
    )
