"""Shorten the curves of a run for drawing, without losing peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.report.runs import Row

if TYPE_CHECKING:
    import numpy

STRETCHES = 1000  # a long curve keeps the smallest and the largest value of each stretch: about one per pixel


def thinned(values: Sequence[Any], stretches: int = STRETCHES) -> list[int]:
    """Return the positions of the values to draw, in order.

    Up to 2 x `stretches` values are all drawn. Of more values these are drawn: the first, the last, and of each of
    `stretches` equal parts the smallest, the largest and one that is not finite (None, NaN, infinite), if any.
    """
    if len(values) <= 2 * stretches:
        return list(range(len(values)))
    import numpy

    data = numpy.array([math.nan if value is None else value for value in values], dtype=float)
    length = math.ceil(len(data) / stretches)
    padding = stretches * length - len(data)
    data = numpy.concatenate([data, numpy.full(padding, data[-1])]).reshape(stretches, length)
    is_finite = numpy.isfinite(data)
    kept = [
        numpy.where(is_finite, data, math.inf).argmin(1),
        numpy.where(is_finite, data, -math.inf).argmax(1),
        (~is_finite).argmax(1),  # the first value that is not finite; 0 if all are
    ]
    starts = numpy.arange(stretches) * length
    return _positions(starts, kept, ~is_finite.all(1), len(values))


def _positions(
    starts: numpy.ndarray, kept: Sequence[numpy.ndarray], has_gap: numpy.ndarray, num_values: int
) -> list[int]:
    import numpy

    smallest, largest, gap = kept
    found = numpy.concatenate([[0, num_values - 1], starts + smallest, starts + largest, (starts + gap)[has_gap]])
    return [int(each) for each in numpy.unique(found) if each < num_values]


def short(value: Any) -> float | None:
    """Return a number with six digits, for the page; None if it is not finite."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def readable(value: float) -> str:
    """Return a number with four digits, or as an integer if it is large: `0.1234`, `12,780`."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def points(rows: Sequence[Row], name: str, scale: float = 1.0) -> dict[str, list[float | None]]:
    """Return the curve of `name` as columns `step`, `time` and `y`, thinned. `y` is multiplied by `scale`.

    Rows without `name` are left out.
    """
    having = [row for row in rows if name in row and isinstance(row[name], (int, float, type(None)))]
    return columns(having, thinned([row[name] for row in having]), name, scale)


def columns(
    rows: Sequence[Row], positions: Sequence[int], name: str | None = None, scale: float = 1.0
) -> dict[str, list[float | None]]:
    """Return the rows at `positions` as columns `step`, `time` and, if `name` is given, `y`."""
    taken = [rows[position] for position in positions]
    found = {"step": [short(row["step"]) for row in taken], "time": [short(row["time"]) for row in taken]}
    if name is not None:
        found["y"] = [short(value if value is None else scale * value) for value in (row.get(name) for row in taken)]
    return found


def num_not_finite(rows: Sequence[Row], name: str) -> int:
    """Return how often `name` was NaN or infinite. The files store these values as null."""
    return sum(1 for row in rows if name in row and row[name] is None)
