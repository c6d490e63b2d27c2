"""Workers that `mpirun` of Open MPI started."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distributed.errors import ResourceError
from distributed.launching.environments.base import (
    Surroundings,
    Worker,
    WorkerEnvironment,
    are_set,
    derived_port,
    number,
)

is_worker = are_set("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def worker(at: Surroundings) -> Worker:
    """Return the rank of this process among those of mpirun.

    Raises ResourceError on several nodes without MASTER_ADDR, if the address of rank 0 is not known.
    """
    environ = at.environ
    if not is_worker(environ):
        return None
    rank, world_size = number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")
    local_world_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_world_size == world_size else _address(environ, rank))
    if not addr:
        raise ResourceError(
            "MASTER_ADDR is not set and Open MPI runs on several nodes: add -x MASTER_ADDR=HOST_OF_RANK_0 to mpirun"
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return WorkerEnvironment(
        rank, number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", rank), world_size, local_world_size,
        rank // max(1, local_world_size), addr, number(environ, "MASTER_PORT", derived_port(job)), 0, "openmpi",
    )  # fmt: skip


def _address(environ: Mapping[str, str], rank: int) -> str:
    """Return the address of the node on which mpirun runs, or "" if it is not known or rank 0 is on another node.

    Open MPI 4 gives each process a URI of mpirun and one of the daemon of its own node. On the node of mpirun they are the same.
    If mpirun has several addresses, the processes cannot tell which of them all nodes reach.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.fullmatch(r"\d+\.0;tcp://([\d.]+):\d+", uri)
    is_elsewhere = rank == 0 and environ.get("OMPI_MCA_orte_local_daemon_uri") != uri
    return "" if found is None or is_elsewhere else found[1]
