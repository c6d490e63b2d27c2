"""Read how much memory of this machine is free, within the limit of a container.

/proc and the control group are read without psutil, which does not know the limit of a container.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # in a container, its control group (version 2); otherwise a group without a limit


def available_bytes() -> int | None:
    """Return the memory in bytes that new data can use without swapping, or None if the system does not tell.

    It is what Linux has available, or less if the control group of a container allows less.
    """
    try:
        available = _numbers(Path("/proc/meminfo"))["MemAvailable:"] << 10
    except (OSError, LookupError):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError):  # no control group, or no limit ("max")
        left = int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text())
        stat = _numbers(_GROUP / "memory.stat")
        # Files that Linux keeps in memory count as used in the group, but give way to new data.
        available = min(available, left + stat["active_file"] + stat["inactive_file"])
    return available


def _numbers(file: Path) -> dict[str, int]:
    """Return the number in each line of `file`, by the word before it."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
