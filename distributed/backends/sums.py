"""Add up the sums of steps over the ranks, in an order that depends only on the steps and the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distributed.state import Sums


def added(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Sums]:
    """Return name -> (sum, count) of each step. `ranks` holds name -> array [steps, 2] for each rank, which may lack names.

    Ranks are added one after the other, because an all-reduce of three ranks or more rounds each element depending on its position.
    """
    total: dict[str, Any] = {}
    for sums in ranks:
        for name, array in sums.items():
            total[name] = total[name] + array if name in total else array
    return {name: [(value, count) for value, count in total[name].tolist()] for name in sorted(total)}
