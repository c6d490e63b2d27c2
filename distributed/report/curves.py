"""Curves of a run, short enough to draw: no peak is lost on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distributed.report.runs import Row

if TYPE_CHECKING:
    import numpy

STRETCHES = 1000  # of a long curve, each of which keeps its smallest and largest value: about one per pixel


def thinned(values: Sequence[Any], stretches: int = STRETCHES) -> list[int]:
    """Positions of the values to draw, in order: all of up to 2 x `stretches`; of more the first, the last, and of each of
    `stretches` equal stretches the smallest, the largest and one that is no finite number (None, NaN, infinite)."""
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
        (~is_finite).argmax(1),  # the first value of a stretch without one
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
    """A number in six digits, for the page; None where it is no finite one."""
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")


def readable(value: float) -> str:
    """A number in four digits, or as a whole one: `0.1234`, `12,780`."""
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def points(rows: Sequence[Row], name: str, scale: float = 1.0) -> dict[str, list[float | None]]:
    """`name` over the rows that have it: columns `step`, `time` and `y`, which is multiplied by `scale`; thinned."""
    having = [row for row in rows if name in row and isinstance(row[name], (int, float, type(None)))]
    return columns(having, thinned([row[name] for row in having]), name, scale)


def columns(
    rows: Sequence[Row], positions: Sequence[int], name: str | None = None, scale: float = 1.0
) -> dict[str, list[float | None]]:
    """The rows at `positions` as columns `step`, `time` and, of `name`, `y`."""
    taken = [rows[position] for position in positions]
    found = {"step": [short(row["step"]) for row in taken], "time": [short(row["time"]) for row in taken]}
    if name is not None:
        found["y"] = [short(value if value is None else scale * value) for value in (row.get(name) for row in taken)]
    return found


def num_not_finite(rows: Sequence[Row], name: str) -> int:
    """How often `name` was NaN or infinite, which the files say as null."""
    return sum(1 for row in rows if name in row and row[name] is None)
