"""What launching needs of the engines in a worker, by the functions that their registry rows name. No engine is loaded."""

from __future__ import annotations

import pkgutil
import random
import sys

from distributed.config.registry import REGISTRY


def has_joined() -> bool:
    """Return whether the script of this process has joined others by an engine's own call, now or before."""
    rows = REGISTRY.values()
    if any(name in sys.modules for row in rows for name in row.joining_modules):
        return True
    return any(pkgutil.resolve_name(name)() for name in dict.fromkeys(row.has_joined for row in rows if row.has_joined))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, of NumPy and of each engine, as far as they are loaded.

    Every rank gets the same numbers: the same initial model and the same split of the data, also after a restart. `Trainer` later
    gives each rank a stream of its own.
    """
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    for name in dict.fromkeys(row.seed for row in REGISTRY.values() if row.seed):
        pkgutil.resolve_name(name)(seed)
