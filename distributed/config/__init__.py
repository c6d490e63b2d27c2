"""Settings of a run: declared, checked, merged from their sources, and the arithmetic of processes and batches. No framework."""

from distributed.config.settings import DistributedConfig

__all__ = ["DistributedConfig"]
