"""Find out whether a metric function is a mean over samples, by splitting a batch. Loads no framework."""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

from distributed.backends.parts import cut, has_rows

Value = Callable[
    [Callable[..., Any], Any, Any, int], tuple[float, float]
]  # (function, outputs, targets, samples) -> (sum, count)

# Tolerances for equal values. 16-bit floats are widened first, and a mean in float32 is exact to about 1e-6.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
# Errors that a function raises for a part that it does not accept, such as scikit-learn for a part with one class only.
REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def judge(
    function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value
) -> tuple[bool | None, float]:
    """Return (the result of `vote`, the value for the whole batch)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a part may be too small for the function
        whole = _mean(value(function, outputs, targets, num_samples))
        if num_samples < 2 or not (has_rows(outputs, num_samples) and has_rows(targets, num_samples)):
            return None, whole
        parts: list[tuple[float, float]] = []
        with contextlib.suppress(*REFUSES):
            for begin, end in _ranges(num_samples):
                part = cut(outputs, begin, end, num_samples), cut(targets, begin, end, num_samples)
                parts.append(value(function, *part, end - begin))
    if len(parts) < len(_ranges(num_samples)):
        return False, whole
    total = sum(part[0] for part in parts if part[1]), sum(part[1] for part in parts)
    if not near(_mean(total), whole):
        return False, whole
    return (None if all(near(_mean(part), whole) for part in parts) else True), whole


def vote(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value) -> bool | None:
    """Return whether the mean of a function's values for three parts of a batch is its value for the whole batch.

    Return None if the batch proves nothing, because it has fewer than two samples or no rows for its samples, or
    because each part has the value of the whole.
    """
    return judge(function, outputs, targets, num_samples, value)[0]


def _ranges(num_samples: int) -> list[tuple[int, int]]:
    """Return (begin, end) of three parts of different sizes, or of fewer parts if the batch is small.

    With equal sizes, a metric with few possible values would agree by chance more often.
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


def text_of(name: str, function: Callable[..., Any]) -> str:
    called = getattr(function, "__name__", type(function).__name__)
    return (
        f"metric {name!r} gives another value when its batch is split, so a mean over batches is not its value: it is computed"
        f" over all samples from now on. To request that explicitly: metrics={{{name!r}: distributed.over_all({called})}}"
    )
