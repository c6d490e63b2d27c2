"""The registry of cluster environments, and what they say of this process. A new one is one file and one row here."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence

from distributed.launching.environments import horovodrun, openmpi, pod, slurm, tf_config, torchrun
from distributed.launching.environments.base import ClusterEnvironment, NodeEnvironment, Surroundings, WorkerEnvironment

# In the order in which they are asked: RANK and WORLD_SIZE win, and `mpirun` and `horovodrun` may stand in a step of `srun`.
ENVIRONMENTS: list[ClusterEnvironment] = [
    ClusterEnvironment(
        "environment", torchrun.worker, is_worker=torchrun.is_worker, job=torchrun.job, listens_with="TORCHELASTIC_RUN_ID",
        listens="torchrun listens on all interfaces without a secret, and anyone who connects to its c10d rendezvous (the default"
        " on one node) can run code as you",
    ),
    ClusterEnvironment("openmpi", openmpi.worker, is_worker=openmpi.is_worker, listens="mpirun listens on all interfaces"),
    ClusterEnvironment(
        "horovodrun", horovodrun.worker, is_worker=horovodrun.is_worker,
        listens="horovodrun listens on all interfaces without a secret, and anyone who connects while the run starts can take the"
        " place of a rank",
    ),
    ClusterEnvironment("slurm", slurm.worker, slurm.node, job=slurm.job),  # srun's ports authenticate who connects
    ClusterEnvironment("TF_CONFIG", tf_config.worker),
    ClusterEnvironment("pod", pod.worker, pod.node),
]  # fmt: skip


def environment_of(found: WorkerEnvironment) -> ClusterEnvironment | None:
    """Return the row that said the place of a worker, or None if no launcher did."""
    return next((row for row in ENVIRONMENTS if row.name == found.source), None)


def worker_environment(
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    *,
    nproc_per_node: int | None = None,
    num_nodes: int = 1,
) -> WorkerEnvironment | None:
    """Return this process' place among the workers of a launcher, or None if it is to launch workers itself.

    The first row of `ENVIRONMENTS` that knows this process decides.

    Args:
        environ: environment variables, by default those of this process.
        argv: arguments of the script, by default those of this process.
        nproc_per_node: the processes per node that somebody explicitly asked for. Beside it one Slurm task or pod per node
            launches its node (see `node_environment`), and RANK and WORLD_SIZE count only together with what a launcher sets
            beside them.
        num_nodes: the number of nodes that somebody asked for.

    Raises:
        ResourceError: the variables make no sense, or WORLD_SIZE names several processes and nothing says which one this is.
        ConfigError: RANK is above 0, `nproc_per_node` is given, and no launcher set RANK.
    """
    environ = os.environ if environ is None else environ
    at = Surroundings(environ, sys.argv if argv is None else argv, nproc_per_node)
    answers = (row.worker(at) for row in ENVIRONMENTS)
    found = next((answer for answer in answers if answer is not None), None)
    if not found and node_environment(environ, nproc_per_node=nproc_per_node) is None:
        torchrun.refuse_half_a_rank(environ, nproc_per_node, num_nodes)
    return found or None


def node_environment(
    environ: Mapping[str, str] | None = None, *, nproc_per_node: int | None = None
) -> NodeEnvironment | None:
    """Return this node among the nodes of an `srun` step with one task per node, or among pods, or None.

    `environ` and `nproc_per_node` are as in `worker_environment`.
    """
    at = Surroundings(os.environ if environ is None else environ, nproc_per_node=nproc_per_node)
    answers = (False if row.is_worker(at.environ) else row.node(at) for row in ENVIRONMENTS)
    return next((answer for answer in answers if answer is not None), None) or None


def launch_identity(found: WorkerEnvironment, environ: Mapping[str, str] | None = None) -> str | None:
    """Identify the start of a foreign launcher that a worker belongs to. Main process only.

    Return eight hexadecimal digits, which are the same in each restart and different in any other start, or None if the
    launcher says nothing that a restart would say again.
    """
    row = environment_of(found)
    name = "" if row is None else row.job(os.environ if environ is None else environ)
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else None
