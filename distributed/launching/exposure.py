"""Warnings about ports of a run that others can reach and that this package cannot close."""

from __future__ import annotations

import os

from distributed.config import DistributedConfig
from distributed.config.plan import ProcessPlan
from distributed.config.registry import BackendEntry
from distributed.config.settings import DEFAULT_PORT
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import environment_of
from distributed.launching.request import launched_by
from distributed.launching.secret import VARIABLE, shared_secret

_shown: set[str] = set()  # the warnings that this process has shown


def warnings_of(config: DistributedConfig, plan: ProcessPlan, entry: BackendEntry) -> list[str]:
    """Return the warnings about a run whose workers our launcher starts, one for each kind of open port.

    `entry` is the registry entry of the backend, as changed by its options. Raises ConfigError if the secret is too short, or if
    there is no secret and nodes may join and leave during the run.
    """
    if config.min_nodes not in (None, plan.num_nodes) and shared_secret() is None:
        raise ConfigError(
            f"num_nodes={config.min_nodes}:{plan.num_nodes} lets nodes join during the run, which needs a secret:"
            f" set the same {VARIABLE}, or --token-file, on all nodes"
        )
    found = []
    if entry.listens and plan.world_size > 1:
        found.append(_of_listener(entry.listens))
    if plan.num_nodes > 1 and not entry.places_workers and shared_secret() is None:
        found.append(_of_rendezvous("nodes", config.master_addr, config.master_port or DEFAULT_PORT, "on all nodes"))
    return [f"warning: {text}" for text in found]


def launcher_warnings(found: WorkerEnvironment | None) -> list[str]:
    """Return a warning if a foreign launcher started this worker and listens on all interfaces. Main process only.

    This function and those below return each warning once per process, and return none in workers of our own launcher.
    """
    if found is None or found.world_size == 1 or found.restart_count > 0:
        return []
    entry = environment_of(found)
    if entry is None or not entry.listens or (entry.listens_with and entry.listens_with not in os.environ):
        return []
    return _once(_of_listener(entry.listens))


def engine_warnings(listens: str) -> list[str]:
    """Return a warning about the ports of this worker's engine, which `listens` describes. Main process only."""
    return _once(_of_listener(listens))


def store_warnings(host: str, port: int) -> list[str]:
    """Return a warning about the store that this worker hosts at `host`, if no secret is set. Main process only."""
    if shared_secret() is not None:
        return []
    return _once(_of_rendezvous("processes", host, port, "for all of them"))


def script_warnings(host: str, port: int) -> list[str]:
    """Return a warning about the store at `host` that torch opens because the script calls `init_process_group()`."""
    return _once(_of_listener(f"the store of torch.distributed listens at {_address(host, port)} without a secret"))


def _once(text: str) -> list[str]:
    """Return `text` in a list, or an empty list if the warning was shown already.

    In a worker of our own launcher the list is empty, because the launcher shows `warnings_of`.
    """
    if launched_by() is not None or text in _shown:
        return []
    _shown.add(text)
    return [text]


def _of_listener(listens: str) -> str:
    return f"{listens}: run where only people you trust can reach this machine (docs/security.md)"


def _of_rendezvous(who: str, host: str, port: int | None, where: str) -> str:
    return (
        f"the {who} rendezvous at {_address(host, port)} without a secret: anyone who reaches that port can disturb the run but not run code in it;"
        f" set the same {VARIABLE}, or --token-file, {where}"
    )


def _address(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
