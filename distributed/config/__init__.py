"""Settings, the plan of processes, the registry of backends, what they need to know of the machine; what acts on settings is in `backends`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.config.settings import DistributedConfig

__all__ = ["DistributedConfig"]


def __getattr__(name: str) -> Any:
    """Import `DistributedConfig` on first use.

    The settings read the registry of backends at import, so entries can be added to the registry until then.
    """
    if name != "DistributedConfig":
        raise AttributeError(f"module 'distributed.config' has no attribute {name!r}")
    from distributed.config.settings import DistributedConfig

    return DistributedConfig
