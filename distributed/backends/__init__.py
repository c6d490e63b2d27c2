"""The protocol of an engine (`base`) and an adapter for each; the registry of backends belongs in `config`, the loop in `training`."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from distributed.config.plan import plan_processes
from distributed.config.registry import backend_entry, require_installed

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.backends.starting import Starting
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.registry import BackendEntry
    from distributed.config.settings import DistributedConfig


def backend_class(name: str) -> type[Backend[Any]]:
    """Return the adapter class of backend `name`. Its module is imported, but not its engine."""
    entry = backend_entry(name)
    cls: type[Backend[Any]] = pkgutil.resolve_name(f"{entry.module}:{entry.class_name}")
    return cls


def starting_of(name: str) -> Starting:
    """Return how a run of backend `name` starts. Loads no engine."""
    entry = backend_entry(name)
    starting: Starting = pkgutil.resolve_name(entry.starting)(entry)
    return starting


def plan_of(config: DistributedConfig) -> ProcessPlan:
    """Return the processes of a run that is started here, on this machine or on the cluster that its backend joins.

    Raises DistributedError as `plan_processes` does.
    """
    return starting_of(config.backend).plan(config) if config.backend is not None else plan_processes(config)


def entry_in_use(config: DistributedConfig, name: str) -> BackendEntry:
    """Return the registry entry of `name` as changed by its options in `config`."""
    return starting_of(name).entry(config.options(backend_entry(name).group))


def groups_in_use(config: DistributedConfig, name: str) -> tuple[str, ...]:
    """Return the option groups that apply to backend `name`, its own first."""
    group = backend_entry(name).group
    return (group, *(backend_entry(each).group for each in starting_of(name).groups(config.options(group))))


def make_backend(merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
    """Return the adapter of `plan.backend` for these settings.

    Raises:
        ConfigError: if the adapter refuses a setting, or its libraries are not installed.
    """
    entry = entry_in_use(merged.config, plan.backend)
    require_installed(entry)
    return starting_of(entry.name).make(merged, plan)
