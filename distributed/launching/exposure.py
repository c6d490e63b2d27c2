"""Warnings about ports that a run leaves open to others and cannot close."""

from __future__ import annotations

import dataclasses
import os

from distributed.config import DistributedConfig
from distributed.config.plan import ProcessPlan
from distributed.config.registry import row_in_use
from distributed.launching.request import WorkerEnvironment, launched_by
from distributed.launching.secret import VARIABLE, shared_secret

# What other launchers listen on, by the source of a WorkerEnvironment. srun's ports check who connects.
_LAUNCHERS = {
    "torchrun": (
        "torchrun listens on all interfaces without a secret, and whoever connects to its c10d rendezvous, the default on one"
        " node, can run code as you"
    ),
    "openmpi": "mpirun listens on all interfaces",
    "horovodrun": (
        "horovodrun listens on all interfaces without a secret, and whoever connects while the run starts can take the place"
        " of a rank"
    ),
}


@dataclasses.dataclass
class _ThisProcess:
    shown: set[str] = dataclasses.field(default_factory=set)


_this = _ThisProcess()


def warnings_of(config: DistributedConfig, plan: ProcessPlan) -> list[str]:
    """Return one warning for each kind of port that others can reach in workers that our launcher starts.

    Raises ConfigError if the secret can be guessed.
    """
    found = []
    listens = row_in_use(config, plan.backend).listens
    if listens and plan.world_size > 1:
        found.append(_of_listener(listens))
    if plan.num_nodes > 1 and shared_secret() is None:
        found.append(_of_meeting("nodes", config.master_addr, config.master_port, "on all nodes"))
    return [f"warning: {text}" for text in found]


def launcher_warnings(found: WorkerEnvironment | None) -> list[str]:
    """Return a warning if another launcher started this worker and listens where others can reach it.

    A process gets each of these warnings, and of those below, once. Main process only.
    """
    if found is None or found.world_size == 1 or found.restart_count > 0:
        return []
    is_torchrun = found.source == "environment" and "TORCHELASTIC_RUN_ID" in os.environ
    source = "torchrun" if is_torchrun else found.source
    return _once(_of_listener(_LAUNCHERS[source])) if source in _LAUNCHERS else []


def engine_warnings(listens: str) -> list[str]:
    """Return a warning that this worker's engine opens what `listens` says. Main process only."""
    return _once(_of_listener(listens))


def store_warnings(host: str, port: int) -> list[str]:
    """Return a warning that this worker hosts a store at `host` if there is no secret. Main process only."""
    if shared_secret() is not None:
        return []
    return _once(_of_meeting("processes", host, port, "for all of them"))


def script_warnings(host: str, port: int) -> list[str]:
    """Return a warning that torch hosts a store at `host` for `init_process_group()` of this worker's script."""
    return _once(_of_listener(f"the store of torch.distributed listens at {_place(host, port)} without a secret"))


def _once(text: str) -> list[str]:
    """Return `text` if it has to be shown in this process. Our own launcher shows `warnings_of` before it starts workers."""
    if launched_by() is not None or text in _this.shown:
        return []
    _this.shown.add(text)
    return [text]


def _of_listener(listens: str) -> str:
    return f"{listens}: run where only people you trust can reach this machine (docs/security.md)"


def _of_meeting(who: str, host: str, port: int | None, where: str) -> str:
    return (
        f"the {who} meet at {_place(host, port)} without a secret: whoever reaches that port can disturb the run, but not run code in it;"
        f" set the same {VARIABLE}, or --token-file, {where}"
    )


def _place(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
