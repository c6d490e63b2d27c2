"""Warnings about ports of a run that others can reach and that this package cannot close."""

from __future__ import annotations

import dataclasses
import os

from distributed.config import DistributedConfig
from distributed.config.plan import ProcessPlan
from distributed.config.registry import row_in_use
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import environment_of
from distributed.launching.request import launched_by
from distributed.launching.secret import VARIABLE, shared_secret


@dataclasses.dataclass
class _ThisProcess:
    shown: set[str] = dataclasses.field(default_factory=set)


_this = _ThisProcess()


def warnings_of(config: DistributedConfig, plan: ProcessPlan) -> list[str]:
    """Return the warnings about a run whose workers our launcher starts, one for each kind of open port.

    Raises ConfigError if the secret is too short.
    """
    found = []
    listens = row_in_use(config, plan.backend).listens
    if listens and plan.world_size > 1:
        found.append(_of_listener(listens))
    if plan.num_nodes > 1 and shared_secret() is None:
        found.append(_of_rendezvous("nodes", config.master_addr, config.master_port, "on all nodes"))
    return [f"warning: {text}" for text in found]


def launcher_warnings(found: WorkerEnvironment | None) -> list[str]:
    """Return a warning if another launcher started this worker and listens on all interfaces. Main process only.

    This function and the ones below return each warning once per process, and none in workers of our own launcher.
    """
    if found is None or found.world_size == 1 or found.restart_count > 0:
        return []
    row = environment_of(found)
    if row is None or not row.listens or (row.listens_with and row.listens_with not in os.environ):
        return []
    return _once(_of_listener(row.listens))


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
    """Return `text`, or nothing if this process has shown it. Our launcher shows `warnings_of` before it starts its workers."""
    if launched_by() is not None or text in _this.shown:
        return []
    _this.shown.add(text)
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
