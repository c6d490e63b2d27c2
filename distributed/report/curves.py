"""Shorten the curves of a run for drawing, without losing peaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.report.runs import Record

if TYPE_CHECKING:
    import numpy

STRETCHES = 1000  # a long curve keeps the smallest and the largest value of each stretch: about one per pixel


def thinned(values: Sequence[Any], stretches: int = STRETCHES) -> list[int]:
    """Return the positions of the values to draw, in order.

    Up to 2 x `stretches` values are all drawn. If there are more, the first and the last value are drawn, and from each of
    `stretches` equal parts the smallest value, the largest value and one that is not finite (None, NaN, infinite), if any.
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
        (~is_finite).argmax(1),  # the first value that is not finite; 0 if all are finite
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


def points(records: Sequence[Record], name: str, scale: float = 1.0) -> dict[str, list[float | None]]:
    """Return the curve of `name` as columns `step`, `time` and `y`, thinned. `y` is multiplied by `scale`.

    Rows without `name` are left out.
    """
    having = [record for record in records if name in record and isinstance(record[name], (int, float, type(None)))]
    return columns(having, thinned([record[name] for record in having]), name, scale)


def columns(
    records: Sequence[Record], positions: Sequence[int], name: str | None = None, scale: float = 1.0
) -> dict[str, list[float | None]]:
    """Return the records at `positions` as columns `step`, `time` and, if `name` is given, `y`."""
    taken = [records[position] for position in positions]
    found = {"step": [short(record["step"]) for record in taken], "time": [short(record["time"]) for record in taken]}
    if name is not None:
        found["y"] = [
            short(value if value is None else scale * value) for value in (record.get(name) for record in taken)
        ]
    return found


def num_not_finite(records: Sequence[Record], name: str) -> int:
    """Return how often `name` was NaN or infinite. The files store these values as null."""
    return sum(1 for record in records if name in record and record[name] is None)
