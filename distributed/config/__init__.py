"""Settings of a run: declared, checked, merged from their sources, with the plan of processes and batches and the rows of backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig

__all__ = ["DistributedConfig"]


def __getattr__(name: str) -> Any:
    """Resolve `DistributedConfig` on first use: the settings read the registry of backends, to which rows may be added before."""
    if name != "DistributedConfig":
        raise AttributeError(f"module 'distributed.config' has no attribute {name!r}")
    from distributed.config.settings import DistributedConfig

    return DistributedConfig
