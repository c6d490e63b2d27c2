"""Is a metric function a mean over samples? Asked by cutting a batch. No framework."""

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

# Means agree up to rounding: 16-bit floats are widened first, a mean over a batch in float32 is exact to about 1e-6.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
# What functions raise for a part that they do not take, as scikit-learn for one class alone.
REFUSES = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)


def judge(
    function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value
) -> tuple[bool | None, float]:
    """Return (`vote`, the value for the whole batch)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that are too small to be measured
        whole = _mean(value(function, outputs, targets, num_samples))
        if num_samples < 2 or not (has_rows(outputs, num_samples) and has_rows(targets, num_samples)):
            return None, whole
        parts: list[tuple[float, float]] = []
        with contextlib.suppress(*REFUSES):
            for begin, end in _places(num_samples):
                part = cut(outputs, begin, end, num_samples), cut(targets, begin, end, num_samples)
                parts.append(value(function, *part, end - begin))
    if len(parts) < len(_places(num_samples)):
        return False, whole
    total = sum(part[0] for part in parts if part[1]), sum(part[1] for part in parts)
    if not near(_mean(total), whole):
        return False, whole
    return (None if all(near(_mean(part), whole) for part in parts) else True), whole


def vote(function: Callable[..., Any], outputs: Any, targets: Any, num_samples: int, value: Value) -> bool | None:
    """Return whether the mean over three parts of a batch is the value of the whole.

    None where that proves nothing, because the batch is too small, or all parts have the value of the whole.
    """
    return judge(function, outputs, targets, num_samples, value)[0]


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


def text_of(name: str, function: Callable[..., Any]) -> str:
    called = getattr(function, "__name__", type(function).__name__)
    return (
        f"metric {name!r} gives another value when its batch is split, so a mean over batches is not its value: it is computed"
        f" over all samples from now on. To say so yourself: metrics={{{name!r}: distributed.over_all({called})}}"
    )
