"""Restore the sweep of an earlier process: the trials whose results the search algorithm must know, and the trials that
are still to be run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.tuning.plan import SweepPlan
from distributed.tuning.proposals import Proposals, make_proposals
from distributed.tuning.sweep import OPEN, score_of


def primed(plan: SweepPlan) -> tuple[Proposals, list[tuple[int, Mapping[str, Any]]]]:
    """Return the search algorithm and the trials to run first.

    The search algorithm has received the results of an earlier process. The trials to run first are those that did not end,
    and those that were proposed but never began.

    Returns:
        `(proposals, waiting)`, where `waiting` holds a pair `(number of the trial, its values)` for each trial to run
        first.
    """
    proposals = make_proposals(plan.search, plan.space, plan.seed)
    waiting: list[tuple[int, Mapping[str, Any]]] = []
    earlier = {record.number: record for record in plan.earlier}
    for number in range(num_begun(plan)):
        record = earlier.get(number)
        if record is None:
            waiting.append((number, proposals.ask()))
            continue
        best = min((score_of(row, plan.metric, plan.mode) for row in record.rows), default=float("inf"))
        proposals.repeat(record.config, None if record.status in OPEN else best)
        if record.status in OPEN:
            waiting.append((number, record.config))
    return proposals, waiting


def num_begun(plan: SweepPlan) -> int:
    """Return how many trial numbers an earlier process has used. Trials with lower numbers may not have begun."""
    return max((record.number + 1 for record in plan.earlier), default=0)
