"""Whether a script has joined other processes by an engine's own call. No engine is loaded to find out."""

from __future__ import annotations

import pkgutil
import sys

from distributed.config.registry import REGISTRY


def has_joined() -> bool:
    """Return whether the script of this process has joined others by an engine's own call, now or before."""
    rows = REGISTRY.values()
    if any(name in sys.modules for row in rows for name in row.joining_modules):
        return True
    return any(pkgutil.resolve_name(name)() for name in dict.fromkeys(row.has_joined for row in rows if row.has_joined))
