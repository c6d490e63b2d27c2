"""Workers that `horovodrun` started over Gloo. Over MPI, `horovodrun` calls `mpirun`, see `openmpi.py`."""

from __future__ import annotations

from distributed.launching.environments.base import (
    Surroundings,
    Worker,
    WorkerEnvironment,
    are_set,
    derived_port,
    number,
)

is_worker = are_set("HOROVOD_RANK", "HOROVOD_SIZE")


def worker(at: Surroundings) -> Worker:
    """Return the rank of this process among the workers of horovodrun.

    With several nodes, `master_addr` is the host of horovodrun's rendezvous server.
    """
    environ = at.environ
    if not is_worker(environ):
        return None
    server = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or "127.0.0.1"
    job = f"{server}:{environ.get('HOROVOD_GLOO_RENDEZVOUS_PORT', '')}"
    is_one_node = number(environ, "HOROVOD_CROSS_SIZE", 1) == 1
    return WorkerEnvironment(
        number(environ, "HOROVOD_RANK"), number(environ, "HOROVOD_LOCAL_RANK", 0), number(environ, "HOROVOD_SIZE"),
        number(environ, "HOROVOD_LOCAL_SIZE", 1), number(environ, "HOROVOD_CROSS_RANK", 0),
        environ.get("MASTER_ADDR") or ("127.0.0.1" if is_one_node else server),
        number(environ, "MASTER_PORT", derived_port(job)), 0, "horovodrun",
    )  # fmt: skip
