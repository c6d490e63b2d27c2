"""Call the functions that the registry entries name for their engines. Only `use_store` loads an engine."""

from __future__ import annotations

import pkgutil
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from distributed.config.registry import REGISTRY


def has_joined() -> bool:
    """Return whether the script joined other processes by calling an engine directly, even if it has left them since."""
    entries = REGISTRY.values()
    if any(name in sys.modules for entry in entries for name in entry.joining_modules):
        return True
    return any(ask() for ask in _functions("has_joined"))


def use_store(path: str | None) -> None:
    """Let a script that calls an engine directly find the other workers. Call this once, before the script.

    Args:
        path: the file that all workers share, or None if they share none, as on several nodes.
    """
    for use in _functions("use_store"):
        use(path)


def seed_generators(seed: int) -> None:
    """Seed the global random generators of Python, NumPy and each engine that is loaded.

    Every rank then draws the same numbers and gets the same initial model and the same split of the data, also after a restart.
    Later, `Trainer` gives each rank a random stream of its own.
    """
    seed_python_and_numpy(seed, seed & 0xFFFFFFFF)
    for seed_engine in _functions("seed"):
        seed_engine(seed)


def seed_python_and_numpy(seed: int, numpy_seed: int) -> None:
    """Seed the global random generators of Python and, if it is loaded, NumPy, which takes 32 bits."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(numpy_seed)


def active_profiler() -> str | None:
    """Return the name of an engine's profiler that records this process, or None."""
    return next((name for ask in _functions("active_profiler") if (name := ask()) is not None), None)


def picklable(data: Any) -> Any:
    """Return the data of a fit without the state that an engine keeps in it for this process and that cannot be pickled."""
    if isinstance(data, dict):  # validation sets by name
        return {name: picklable(value) for name, value in data.items()}
    for leave_out in _functions("picklable"):
        data = leave_out(data)
    return data


def _functions(field: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions that the entries name in `field`, each once."""
    names = dict.fromkeys(getattr(entry, field) for entry in REGISTRY.values())
    return (pkgutil.resolve_name(name) for name in names if name)
