"""Read from the registry and the adapters what each backend can do. `distributed backends`, the docs and the suite use it.

Imports no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.backends import backend_class
from distributed.backends.effects import needs_of
from distributed.callbacks import NEEDS
from distributed.config.fields import rules
from distributed.config.registry import (
    REGISTRY,
    BackendEntry,
    cpus_only_reason,
    missing_libraries,
    one_process_reason,
)
from distributed.config.settings import GROUPS, DistributedConfig, group_options

SEVERAL = "several processes"  # key of the refusal of backends that run one process only
MODELS = "several models"  # key of the refusal of backends that train one model with one optimizer
NO_SETTINGS = (SEVERAL, MODELS, *NEEDS)  # keys of refusals that are no settings
_OF_GPUS = ("device=cuda", "num_gpus", "gpus_per_node")  # settings that ask for GPUs
_OF_NODES = ("num_nodes", "node_rank", "min_nodes", "min_nproc_per_node")  # settings that ask for several processes


@dataclasses.dataclass(frozen=True)
class Condition:
    """Hold a condition under which a setting is refused, and why."""

    when: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Hold what a backend can do. Keys of `refuses` and `conditions` are "setting", "setting=value" or in `NO_SETTINGS`."""

    backend: str
    group: str  # name of the backend's option group
    summary: str
    missing: tuple[str, ...]  # libraries that are not installed
    install: str  # the command that installs them
    refuses: Mapping[str, str]  # setting -> why it is refused, and what to use instead
    options: Mapping[str, str]  # option of the backend -> what it does
    conditions: Mapping[str, tuple[Condition, ...]] = dataclasses.field(default_factory=dict)
    # Setting or option -> what it needs to have an effect.
    needs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def accepts(self, setting: str) -> bool:
        """Return whether `setting` ("name" or "name=value") works, always or under conditions.

        For a bare name, return whether any value except the default works.
        """
        return setting not in self.refuses and setting.partition("=")[0] not in self.refuses

    def conditions_of(self, setting: str) -> tuple[Condition, ...]:
        """Return the conditions under which `setting` is refused. Return () for a setting that is always refused."""
        name = setting.partition("=")[0]
        keys = dict.fromkeys((setting, name)) if self.accepts(setting) else ()
        return tuple(each for key in keys for each in self.conditions.get(key, ()))


def capabilities_of(entry: BackendEntry) -> Capabilities:
    """Return the capabilities of the backend of `entry`."""
    adapter = backend_class(entry.name)
    all_refused = {**adapter.refuses, **adapter.refuses_callbacks}
    refuses = {name: why for name, why in all_refused.items() if isinstance(why, str)}
    if entry.cpus_only:
        refuses = {**dict.fromkeys(_OF_GPUS, cpus_only_reason()), **refuses}
    if entry.single_process:
        refuses = {**dict.fromkeys((SEVERAL, *_OF_NODES), one_process_reason()), **refuses}
    if adapter.refuses_several:
        refuses = {MODELS: adapter.refuses_several, **refuses}
    conditions = {
        name: tuple(Condition(each.when, each.reason) for each in why)
        for name, why in all_refused.items()
        if not isinstance(why, str)
    }
    options = {name: rule.help for name, rule in rules(adapter.Options).items()}
    named = [*settings_for_all(), *(f"{entry.group}.{name}" for name in options)]
    needs = {
        name: " and ".join(need.what for need in found)
        for name in named
        if name not in refuses and (found := needs_of(adapter, name))
    }
    return Capabilities(
        entry.name,
        entry.group,
        entry.summary,
        missing_libraries(entry),
        entry.install,
        refuses,
        options,
        conditions,
        needs,
    )


def all_capabilities() -> list[Capabilities]:
    """Return the capabilities of every registered backend, in the order of the registry."""
    return [capabilities_of(entry) for entry in REGISTRY.values()]


def table(backends: Iterable[Capabilities]) -> dict[str, dict[str, str]]:
    """Return setting -> backend -> "yes", "no" or "if", for the settings that some backend refuses, always or sometimes."""
    backends = list(backends)
    order = [*NO_SETTINGS, *DistributedConfig.__dataclass_fields__]
    named = dict.fromkeys(name for backend in backends for name in (*backend.refuses, *backend.conditions))
    rows = sorted(named, key=lambda name: order.index(field_of(name).partition(".")[0]))
    return {name: {backend.backend: _word(backend, name) for backend in backends} for name in rows}


def _word(backend: Capabilities, setting: str) -> str:
    if not backend.accepts(setting):
        return "no"
    return "if" if backend.conditions_of(setting) else "yes"


def field_of(setting: str) -> str:
    """Return NAME of a setting that is written "NAME" or "NAME=VALUE"."""
    return setting.partition("=")[0]


def settings_for_all() -> list[str]:
    """Return every setting that does not belong to one backend: the fields, and the options that all backends share."""
    own = {entry.group for entry in REGISTRY.values()}
    shared = [f"{group}.{name}" for group in GROUPS if group not in own for name in rules(group_options(group))]
    return [name for name in DistributedConfig.__dataclass_fields__ if name not in GROUPS] + shared


def everywhere(backends: Iterable[Capabilities]) -> list[str]:
    """Return the settings that every backend accepts with every value."""
    refused = {field_of(name) for backend in backends for name in (*backend.refuses, *backend.conditions)}
    return [name for name in settings_for_all() if name not in refused]


def to_json(backend: Capabilities) -> dict[str, Any]:
    """Return `backend` as a JSON-able dict. Its entry "settings" maps each setting to whether it is accepted."""
    settings = {name: backend.accepts(name) for name in settings_for_all()}
    settings |= dict.fromkeys(backend.refuses, False)
    return {**dataclasses.asdict(backend), "settings": settings}
