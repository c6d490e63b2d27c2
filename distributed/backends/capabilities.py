"""Read from the registry and the adapters what each backend can do. `distributed backends`, the docs and the suite use it.

Imports no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.backends.effects import needs_of
from distributed.config.fields import rules
from distributed.config.registry import (
    REGISTRY,
    BackendRow,
    backend_class,
    cpus_only_reason,
    missing_libraries,
    one_process_reason,
)
from distributed.config.settings import GROUPS, DistributedConfig, group_options

SEVERAL = "several processes"  # key of the refusal of backends that run one process only
_OF_GPUS = ("device=cuda", "num_gpus", "gpus_per_node")  # settings that ask for GPUs
_OF_NODES = ("num_nodes", "node_rank")  # settings that ask for several processes


@dataclasses.dataclass(frozen=True)
class Condition:
    """Hold a condition under which a setting is refused, and why."""

    when: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Hold what a backend can do. Keys of `refuses` and `conditions` are "setting" or "setting=value"."""

    backend: str
    group: str  # name of the group of its options
    summary: str
    missing: tuple[str, ...]  # libraries that are not installed
    install: str  # the command that installs them
    refuses: Mapping[str, str]  # setting -> why, and what to use instead
    options: Mapping[str, str]  # its own options -> what they do
    conditions: Mapping[str, tuple[Condition, ...]] = dataclasses.field(default_factory=dict)
    # Setting or option -> what it needs to have an effect.
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def accepts(self, setting: str) -> bool:
        """Return whether `setting` ("name" or "name=value") works, always or under conditions.

        For a bare name, return whether any value except the default works.
        """
        return setting not in self.refuses and setting.partition("=")[0] not in self.refuses

    def conditions_of(self, setting: str) -> tuple[Condition, ...]:
        """Return the conditions under which `setting`, which otherwise works, is refused."""
        name = setting.partition("=")[0]
        keys = dict.fromkeys((setting, name)) if self.accepts(setting) else ()
        return tuple(each for key in keys for each in self.conditions.get(key, ()))


def capabilities_of(row: BackendRow) -> Capabilities:
    """Return the capabilities of the backend of `row`."""
    adapter = backend_class(row.name)
    refuses = {name: why for name, why in adapter.refuses.items() if isinstance(why, str)}
    if row.cpus_only:
        refuses = {**dict.fromkeys(_OF_GPUS, cpus_only_reason()), **refuses}
    if row.single_process:
        refuses = {**dict.fromkeys((SEVERAL, *_OF_NODES), one_process_reason()), **refuses}
    conditions = {
        name: tuple(Condition(each.when, each.reason) for each in why)
        for name, why in adapter.refuses.items()
        if not isinstance(why, str)
    }
    options = {name: rule.help for name, rule in rules(adapter.Options).items()}
    named = [*settings_for_all(), *(f"{row.group}.{name}" for name in options)]
    needs = {
        name: " and ".join(need.what for need in found)
        for name in named
        if name not in refuses and (found := needs_of(adapter, name))
    }
    return Capabilities(
        row.name, row.group, row.summary, missing_libraries(row), row.install, refuses, options, conditions, needs
    )


def all_capabilities() -> list[Capabilities]:
    """Return the capabilities of every registered backend, in the order of the registry."""
    return [capabilities_of(row) for row in REGISTRY.values()]


def table(backends: Iterable[Capabilities]) -> dict[str, dict[str, str]]:
    """Return setting -> backend -> "yes", "no" or "if", for the settings that some backend refuses, always or sometimes."""
    backends = list(backends)
    order = [SEVERAL, *DistributedConfig.__dataclass_fields__]
    named = dict.fromkeys(name for backend in backends for name in (*backend.refuses, *backend.conditions))
    rows = sorted(named, key=lambda name: order.index(field_of(name).partition(".")[0]))
    return {name: {backend.backend: _word(backend, name) for backend in backends} for name in rows}


def _word(backend: Capabilities, setting: str) -> str:
    if not backend.accepts(setting):
        return "no"
    return "if" if backend.conditions_of(setting) else "yes"


def field_of(setting: str) -> str:
    """Return the name in "name" or "name=value"."""
    return setting.partition("=")[0]


def settings_for_all() -> list[str]:
    """Return every setting that does not belong to one backend: the fields, and the options that all backends share."""
    own = {row.group for row in REGISTRY.values()}
    shared = [f"{group}.{name}" for group in GROUPS if group not in own for name in rules(group_options(group))]
    return [name for name in DistributedConfig.__dataclass_fields__ if name not in GROUPS] + shared


def everywhere(backends: Iterable[Capabilities]) -> list[str]:
    """Return the settings that every backend accepts with every value."""
    refused = {field_of(name) for backend in backends for name in (*backend.refuses, *backend.conditions)}
    return [name for name in settings_for_all() if name not in refused]


def to_json(backend: Capabilities) -> dict[str, Any]:
    """Return `backend` as a JSON-able dict, with setting -> whether it is accepted under "settings"."""
    settings = {name: backend.accepts(name) for name in settings_for_all()}
    settings |= dict.fromkeys(backend.refuses, False)
    return {**dataclasses.asdict(backend), "settings": settings}
