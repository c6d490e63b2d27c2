"""Whether a script has joined others by torch's own call. torch is not loaded to find out."""

from __future__ import annotations

import sys


def has_joined() -> bool:
    """Return whether the script has called `torch.distributed.init_process_group`.

    A group that was left again is known by what it leaves behind: torch keeps how it was made, unless a store was given, and the
    hook that prefixes tracebacks with the rank.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return False
    was_made = getattr(c10d, "_default_pg_init_method", None) is not None
    return was_made or bool(c10d.is_initialized()) or getattr(sys.excepthook, "__module__", "") == c10d.__name__
