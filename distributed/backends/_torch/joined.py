"""Detect whether a script has called `torch.distributed.init_process_group`, without loading torch."""

from __future__ import annotations

import sys


def has_joined() -> bool:
    """Return whether the script has called `torch.distributed.init_process_group`.

    A process group that was destroyed since is detected by its traces: the recorded init method, which torch sets unless a
    store was given, and the exception hook that prefixes tracebacks with the rank.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return False
    was_made = getattr(c10d, "_default_pg_init_method", None) is not None
    return was_made or bool(c10d.is_initialized()) or getattr(sys.excepthook, "__module__", "") == c10d.__name__
