"""Find in the events of a run why its workers failed. `distributed why`, `fit` and sweeps all name the same cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FAILURES = ("worker_failed", "node_failed", "not_started")  # events with the reason why workers failed or did not start
STACKS = "; stacks are in "  # before the directory, in the cause of a hang
STARTS = ("started", "restarted", "regrouped")  # events at which another attempt begins
_CONSEQUENCE = "lost the connection to another rank"  # in a cause that only says that another rank has ended
_KEPT = ("in_step", "phase", "then")  # of a consequence, if a lost node is its cause


def failures_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cause of each attempt that failed: its first failure that is not a consequence of another one.

    A lost node is the cause of a consequence before it. The end of the run because of this node is a better cause.
    """
    found: list[dict[str, Any]] = []
    is_new = True
    for event in events:
        kind = event["event"]
        is_consequence = not is_new and _CONSEQUENCE in str(found[-1].get("cause"))
        if kind == "node_lost" and event.get("cause") and is_consequence:  # Ray knows no cause
            found[-1] = {**event, **{name: found[-1][name] for name in _KEPT if name in found[-1]}}
        elif kind not in FAILURES:
            is_new = is_new or kind in STARTS
        elif is_new:
            found.append(event)
            is_new = False
        elif is_consequence or (found[-1]["event"] == "node_lost" and kind == "node_failed"):
            found[-1] = event
    return found


def last_failure_of(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the cause of the newest attempt that failed, or None."""
    return next(reversed(failures_of(events)), None)
