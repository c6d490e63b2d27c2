"""The types of a cluster environment, and the helpers that several of them use."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from distributed.errors import ResourceError


@dataclasses.dataclass(frozen=True)
class WorkerEnvironment:
    """The rank of this process among the workers that a launcher started, and the address at which they join each other."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    restart_count: int
    source: str  # the name of an entry in `registry.py`, or "alone", "arguments" or "torch" if no launcher set it

    def to_environ(self) -> dict[str, str]:
        """Return the variables that a plain torchrun script reads."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    def to_torchrun_environ(
        self, *, num_nodes: int, max_restarts: int, run_id: str, error_file: Path
    ) -> dict[str, str]:
        """Return all variables that torchrun gives to its workers."""
        return {
            **self.to_environ(),
            "GROUP_WORLD_SIZE": str(num_nodes),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count),
            "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "TORCHELASTIC_ERROR_FILE": str(error_file.absolute()),
        }


@dataclasses.dataclass(frozen=True)
class NodeEnvironment:
    """The rank of this process among the nodes, if it is the only task or pod of its node and launches the node's workers."""

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    nproc_per_node: int | None = None  # None if the environment does not say


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """Variables and arguments by which a cluster environment recognizes itself."""

    environ: Mapping[str, str]
    argv: Sequence[str] = ()
    nproc_per_node: int | None = None  # the processes per node, if they were given


# What `worker` and `node` of an environment return. None: the variables of this environment are not set, so the next entry is
# asked. False: the variables are set, but this process is not a worker, or does not launch a node; no further entry is asked.
Worker = WorkerEnvironment | Literal[False] | None
Node = NodeEnvironment | Literal[False] | None


def _no_worker(environ: Mapping[str, str]) -> bool:
    return False


def _no_node(at: Surroundings) -> Node:
    return None


def _no_job(environ: Mapping[str, str]) -> str:
    return ""


@dataclasses.dataclass(frozen=True)
class ClusterEnvironment:
    """An entry of the registry: one way in which a launcher gives a process its rank.

    Attributes:
        name: `WorkerEnvironment.source` of the workers.
        worker: returns the rank of this process among the workers, or None or False (see `Worker`).
        node: returns the rank of this node among nodes that launch their own workers, or None or False. Not called in a worker.
        listens: a warning about the ports that the launcher opens to other machines; "" if it opens none.
        listens_with: an environment variable without which the launcher opens no ports, or "".
        job: returns a name that is the same in each restart of this start and different in any other start, or "".
        is_worker: returns whether this process is a worker of the launcher and therefore launches no node.
    """

    name: str
    worker: Callable[[Surroundings], Worker]
    node: Callable[[Surroundings], Node] = _no_node
    listens: str = ""
    listens_with: str = ""
    job: Callable[[Mapping[str, str]], str] = _no_job
    is_worker: Callable[[Mapping[str, str]], bool] = _no_worker


def are_set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    """Return the `is_worker` of a launcher that sets the variables `names` in its workers."""
    return lambda environ: all(name in environ for name in names)


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable `name` as an integer, or `default` if it is empty or missing. Raises ResourceError for any other text."""
    text = environ.get(name, "")
    if text == "" and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ResourceError(
            f"{name}={text!r} is not a whole number: correct the launcher or script that sets it, or unset it"
        ) from None


def derived_port(job: str) -> int:
    """Return a port that is the same in every process of `job`, below the range from which the kernel assigns free ports."""
    return 20000 + zlib.crc32(job.encode()) % 12000
