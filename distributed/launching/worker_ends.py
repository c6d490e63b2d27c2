"""Add to the message that a worker has ended what it was doing then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed.launching.heartbeat import Reports
from distributed.launching.stacks import line_in_script


def with_progress(message: Mapping[str, Any], reports: Reports, log: Callable[[str], None]) -> dict[str, Any]:
    """Return the message "exit" of a worker with its step, its phase and, if a signal such as SIGSEGV ended it, its line.

    Args:
        message: the message, which names the worker by `local_rank`.
        reports: what the workers have reported.
        log: called with the stacks of a worker that crashed.
    """
    index = message["local_rank"]
    progress = reports.progress(index)
    found = {**message, "reached": (progress.fit, progress.step), "phase": progress.phase.in_fit}
    if message["status"] < 0 and (crash := reports.crash(index)):
        log(crash)
        found["location"] = line_in_script(crash)
    return found
