"""What an engine needs beside torchrun's environment so that its workers find each other."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from distributed.launching.environment import WorkerEnvironment


class Meeting(Protocol):
    """Made once in the launcher of each node."""

    def open(self) -> Any:
        """Before each attempt, on node 0 alone. What it returns is JSON-able and reaches the other nodes."""

    def environ(self, place: WorkerEnvironment, opened: Any) -> dict[str, str]:
        """The variables of the worker at `place`."""


def make_meeting(name: str | None) -> Meeting | None:
    """The meeting that a backend's registry row names as "module:Class"."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    return cast(Meeting, getattr(importlib.import_module(module), attribute)())
