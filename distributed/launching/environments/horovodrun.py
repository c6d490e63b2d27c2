"""Workers that `horovodrun` started over Gloo. Over MPI, `horovodrun` calls `mpirun`, see `openmpi.py`."""

from __future__ import annotations

from collections.abc import Mapping

from distributed.launching.environments.base import Surroundings, Worker, WorkerEnvironment, derived_port, number


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return whether horovodrun started this process over Gloo."""
    return "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ


def worker(at: Surroundings) -> Worker:
    """Return this process among those of horovodrun. On several nodes the host of its rendezvous server is `master_addr`."""
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
