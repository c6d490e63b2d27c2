"""Read how much memory of this machine is free, within the limit of a container.

/proc and the control group are read without psutil, which does not know the limit of a container.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")  # in a container, its control group; otherwise a group without a limit
# Directory and files of the limit, the memory in use and the statistics, in version 2 and in version 1, and the prefix of the
# statistics that include the groups below.
_VERSIONS = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def available_bytes() -> int | None:
    """Return the memory in bytes that new data can use without swapping, or None if the system does not tell.

    It is what Linux has available, or less if the control group of a container allows less.
    """
    try:
        available = _numbers(Path("/proc/meminfo"))["MemAvailable:"] << 10
    except (OSError, LookupError):
        return None
    for directory, limit, used, prefix in _VERSIONS:
        group = _GROUP / directory
        with contextlib.suppress(OSError, ValueError, LookupError):  # no control group, or no limit ("max")
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = _numbers(group / "memory.stat")
            # Files that Linux keeps in memory count as used in the group, but give way to new data.
            available = min(available, left + stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"])
    return available


def _numbers(file: Path) -> dict[str, int]:
    """Return the number in each line of `file`, by the word before it."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
