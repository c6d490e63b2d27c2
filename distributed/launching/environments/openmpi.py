"""Workers that `mpirun` of Open MPI started."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.errors import ResourceError
from distributed.launching.environments.base import Surroundings, Worker, WorkerEnvironment, derived_port, number


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI started this process."""
    return "OMPI_COMM_WORLD_RANK" in environ and "OMPI_COMM_WORLD_SIZE" in environ


def worker(at: Surroundings) -> Worker:
    """Return this process among those of mpirun. Raises ResourceError on several nodes without MASTER_ADDR."""
    environ = at.environ
    if not is_worker(environ):
        return None
    rank, world_size = number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")
    local_world_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if local_world_size == world_size else "")
    if not addr:
        raise ResourceError(
            "MASTER_ADDR is not set and Open MPI runs on several nodes: add -x MASTER_ADDR=HOST_OF_RANK_0 to mpirun"
        )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return WorkerEnvironment(
        rank, number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", rank), world_size, local_world_size,
        rank // max(1, local_world_size), addr, number(environ, "MASTER_PORT", derived_port(job)), 0, "openmpi",
    )  # fmt: skip
