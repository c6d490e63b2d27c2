"""Run the steps of training: the protocol (`base`), an adapter for each engine, and what adapters share. The registry is `config.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.config.registry import require_installed, row_in_use, starting_of

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan


def make_backend(merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
    """Return the adapter of `plan.backend` for these settings.

    Raises:
        ConfigError: if the adapter refuses a setting, or its libraries are not installed.
    """
    row = row_in_use(merged.config, plan.backend)
    require_installed(row)
    made: Backend[Any] = starting_of(row.name).make(merged, plan)
    return made
