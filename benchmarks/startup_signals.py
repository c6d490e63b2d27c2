"""How a script that is being timed tells where it is: files with the time in them, in a directory of its own."""

from __future__ import annotations

import time
from pathlib import Path

LIMIT_S = 60


def reached(directory: str, what: str) -> None:
    """Note the time of `what`, so that it appears complete or not at all."""
    path = Path(directory, what)
    path.with_suffix(".part").write_text(repr(time.time()))
    path.with_suffix(".part").rename(path)


def pause(directory: str) -> None:
    """Hold still while the memory of all processes is counted."""
    reached(directory, "paused")
    deadline = time.monotonic() + LIMIT_S
    while not Path(directory, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
