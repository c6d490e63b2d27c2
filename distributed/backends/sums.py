"""Add up the sums of steps over the ranks, in an order that depends only on the steps and the ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from distributed.state import MAX, Sums


def added(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Sums]:
    """Return name -> (sum, count) of each step. `ranks` holds name -> array [steps, 2] for each rank; a rank may lack
    names.

    Ranks are added one after the other. An all-reduce of three or more ranks would round an element depending on its
    position.
    """
    total: dict[str, Any] = {}
    for sums in ranks:
        for name, array in sums.items():
            add = _larger if MAX in name else operator.add
            total[name] = add(total[name], array) if name in total else array
    return {name: [(value, count) for value, count in total[name].tolist()] for name in sorted(total)}


def _larger(one: Any, other: Any) -> Any:
    """Return the larger value of each step with its count. A step whose count is 0 has no value. NaN is larger than any number."""
    values = [numpy.where(array[:, 1] > 0, array[:, 0], -numpy.inf) for array in (one, other)]
    counts = numpy.maximum(one[:, 1], other[:, 1])
    return numpy.stack([numpy.where(counts > 0, numpy.maximum(*values), 0.0), counts], axis=1)
