"""A curve as a row of characters, for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
GAP, NOT_FINITE = " ", "x"

Curve = Sequence[tuple[float, float | None]]  # (step, value), in the order of the steps; None is not finite


def sparkline(
    curve: Curve, steps: tuple[float, float], values: tuple[float, float], width: int, marks: str = BLOCKS
) -> str:
    """Return `curve` in at most `width` characters, one for each part of the range `steps`.

    A character shows the last value of its part, on the scale `values` from the lowest to the highest of `marks`. A part without a
    value repeats the character before it. Parts before the first value are blank, and the text ends with the last value.
    """
    begin, end = steps
    columns: dict[int, str] = {}
    for step, value in curve:
        column = min(int((step - begin) / ((end - begin) or 1.0) * width), width - 1)
        columns[column] = NOT_FINITE if value is None else _mark(value, values, marks)
    line, last = "", GAP
    for column in range(max(columns, default=-1) + 1):
        last = columns.get(column, last)
        line += last
    return line


def _mark(value: float, values: tuple[float, float], marks: str) -> str:
    low, high = values
    part = (value - low) / (high - low) if 0 < high - low < math.inf else 0.0
    return marks[min(int(part * len(marks)), len(marks) - 1)]


def range_of(curves: Sequence[Curve]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ranges of the steps and of the finite values of all `curves`, which have at least one point."""
    steps = [step for curve in curves for step, _ in curve]
    values = [value for curve in curves for _, value in curve if value is not None and math.isfinite(value)] or [0.0]
    return (min(steps), max(steps)), (min(values), max(values))
