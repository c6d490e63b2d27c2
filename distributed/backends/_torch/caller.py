"""Handle torch's profiler and DataLoaders in the process that calls `fit` when workers train. Does not load torch."""

from __future__ import annotations

import copy
import sys
from typing import Any


def active_profiler() -> str | None:
    """Return a name for torch's profiler, for messages, if it records this process, else None."""
    torch = sys.modules.get("torch")  # None where torch is not loaded, and then its profiler is not active
    return "torch profiler" if torch is not None and torch.autograd._profiler_enabled() else None


def picklable(data: Any) -> Any:
    """Return `data`, a DataLoader without its live worker pool.

    Workaround (torch 2.13, pytorch/pytorch#13023; may go when torch leaves the pool out of a pickle): the pool cannot
    be pickled.
    """
    if getattr(data, "_iterator", None) is None:
        return data
    loader = copy.copy(data)
    loader._iterator = None
    return loader
