"""The sums of steps, over the ranks. They are added in an order that depends on nothing but the steps and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed.state import Sums


def added(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Sums]:
    """Return name -> (sum, count) of each step, given name -> array [steps, 2] of each rank, which may lack names.

    Ranks are added one after the other. An all-reduce would not do: with three ranks or more it rounds each element by its place.
    """
    total: dict[str, Any] = {}
    for sums in ranks:
        for name, rows in sums.items():
            total[name] = total[name] + rows if name in total else rows
    return {name: [(value, count) for value, count in total[name].tolist()] for name in sorted(total)}
