"""Find out whether a metric function is a mean over samples, by splitting batches of the first evaluation. No framework."""

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

# Two values count as equal within these bounds. Floats of 16 bits are widened first; a mean in float32 is exact to about 1e-6.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
# A function counts as a mean once so many samples, or batches, have voted for it: a metric that takes few values, such as F1 of
# four samples, passes the test of a single batch by chance now and then.
_ENOUGH_SAMPLES, _ENOUGH_BATCHES = 64.0, 4.0
# Errors that a function raises for a part that it does not accept, such as scikit-learn for a part with one class only.
_REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


class Splitting:
    """Collect the votes on each function until it is known whether the function is a mean.

    Until then a function is computed over all samples, which gives the right value for a mean too.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], notice: Callable[[str], None]) -> None:
        self._unknown, self._notice = dict(functions), notice
        self._samples = dict.fromkeys(functions, 0.0)
        self._batches = dict.fromkeys(functions, 0.0)
        self.not_means: set[str] = set()

    @property
    def unknown(self) -> list[str]:
        """Return the names of the functions that may be means."""
        return list(self._unknown)

    def look(
        self, number: int, outputs: Any, targets: Any, num_samples: int, value: Value, reduce: Reduce
    ) -> dict[str, bool]:
        """Split the batch `number` of an evaluation, counted from 1, and compare the value of the whole with its parts.

        Returns name -> whether it is a mean, for each function of which that has become known. While a function is unknown this
        is a collective for the 1st, 2nd, 4th, 8th, ... batch; other batches are not examined.
        """
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
        """Record that `name` is no mean and tell the user. Returns {name: False}."""
        self._notice(_text(name, self._unknown[name]))
        self.settle({name: False})
        return {name: False}

    def settle(self, known: Mapping[str, bool]) -> None:
        """Record what is known: name -> whether it is a mean, found here or read from a checkpoint."""
        for name, is_mean in known.items():
            if self._unknown.pop(name, None) is not None and not is_mean:
                self.not_means.add(name)

    @property
    def known(self) -> dict[str, bool]:
        """Return name -> whether it is a mean, for each function of which that is known. JSON-able."""
        return {name: name not in self.not_means for name in self._samples if name not in self._unknown}


def vote(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value) -> bool | None:
    """Return whether the mean of the values of three parts of a batch is the value of the whole batch.

    Returns None where the batch proves nothing: it has fewer than two samples, no rows for its samples, or parts that all have
    the value of the whole.
    """
    if num_samples < 2 or not (has_rows(outputs, num_samples) and has_rows(targets, num_samples)):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part may be too small for the function
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
    """Return where three parts of different sizes begin and end, or fewer parts of a small batch.

    Parts of equal sizes would agree by chance more often where a metric takes few values.
    """
    ends = sorted({0, num_samples // 2, num_samples // 2 + num_samples // 3, num_samples})
    return list(itertools.pairwise(ends))


def _mean(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else math.nan


def near(one: float, other: float) -> bool:
    """Return whether two values are equal up to rounding. NaN equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= _RELATIVE * max(abs(one), abs(other)) + _ABSOLUTE


def _text(name: str, function: Callable[..., Any]) -> str:
    called = getattr(function, "__name__", type(function).__name__)
    return (
        f"metric {name!r} gives another value when its batch is split, so a mean over batches is not its value: it is computed"
        f" over all samples from now on. To say so yourself: metrics={{{name!r}: distributed.over_all({called})}}"
    )
