"""Find in the events of a run why its workers failed. `distributed why`, `fit` and sweeps all name the same cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FAILURES = ("worker_failed", "node_failed", "not_started")  # events with the reason why workers failed or did not start
_CONSEQUENCE = "lost the connection to another rank"  # in a cause that only says that another rank has ended


def failures_of(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cause of each attempt that failed: its first failure that is not a consequence of another one."""
    found: list[dict[str, Any]] = []
    is_new = True
    for event in events:
        if event["event"] not in FAILURES:
            is_new = is_new or event["event"] in ("started", "restarted", "regrouped")
        elif is_new:
            found.append(event)
            is_new = False
        elif _CONSEQUENCE in str(found[-1].get("cause")):
            found[-1] = event
    return found


def last_failure_of(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the cause of the newest attempt that failed, or None."""
    return next(reversed(failures_of(events)), None)
