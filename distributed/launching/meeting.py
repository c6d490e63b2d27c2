"""What an engine needs beside torchrun's environment so that its workers find each other."""

from __future__ import annotations

import pkgutil
from typing import Any, Protocol, cast

from distributed.launching.environments.base import WorkerEnvironment


class Meeting(Protocol):
    """Made once in the launcher of each node."""

    def open(self, host: str, *, is_alone: bool) -> Any:
        """Before each attempt, on node 0 only. What it returns is JSON-able and reaches the other nodes.

        Workers look for it at `host`; `is_alone` where there is no other node.
        """

    def environ(self, place: WorkerEnvironment, opened: Any) -> dict[str, str]:
        """The variables of the worker at `place`."""


def make_meeting(name: str | None) -> Meeting | None:
    """The meeting that a backend's registry row names as "module:Class"."""
    return None if name is None else cast(Meeting, pkgutil.resolve_name(name)())
