"""The registry of cluster environments. A new environment needs one file and one entry here."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence

from distributed.launching.environments import horovodrun, openmpi, pod, slurm, tf_config, torchrun
from distributed.launching.environments.base import ClusterEnvironment, NodeEnvironment, Surroundings, WorkerEnvironment

# The first entry that knows this process decides. RANK and WORLD_SIZE come first; `mpirun` and `horovodrun` come before Slurm,
# because they may run inside a step of `srun`.
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
    ClusterEnvironment("slurm", slurm.worker, slurm.node, job=slurm.job),  # no `listens`: srun's ports authenticate who connects
    ClusterEnvironment("TF_CONFIG", tf_config.worker),
    ClusterEnvironment("pod", pod.worker, pod.node),
]  # fmt: skip


def environment_of(found: WorkerEnvironment) -> ClusterEnvironment | None:
    """Return the entry that `found` comes from, or None if it comes from no launcher."""
    return next((entry for entry in ENVIRONMENTS if entry.name == found.source), None)


def worker_environment(
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    *,
    nproc_per_node: int | None = None,
    num_nodes: int = 1,
) -> WorkerEnvironment | None:
    """Return the rank of this process among the workers of a launcher, or None if it is to launch workers itself.

    The first entry of `ENVIRONMENTS` that knows this process decides.

    Args:
        environ: environment variables, by default those of this process.
        argv: arguments of the script, by default those of this process.
        nproc_per_node: the processes per node, if they were given. Then the only Slurm task or pod of a
            node launches the workers of that node (see `node_environment`), and RANK and WORLD_SIZE count only together with
            other variables that a launcher sets.
        num_nodes: the number of nodes that was given.

    Raises:
        ResourceError: the variables make no sense, or WORLD_SIZE names several processes and nothing says which one this is.
        ConfigError: RANK is above 0, `nproc_per_node` is given, and no launcher set RANK.
    """
    environ = os.environ if environ is None else environ
    at = Surroundings(environ, sys.argv if argv is None else argv, nproc_per_node)
    answers = (entry.worker(at) for entry in ENVIRONMENTS)
    found = next((answer for answer in answers if answer is not None), None)
    if not found and node_environment(environ, nproc_per_node=nproc_per_node) is None:
        torchrun.refuse_half_a_rank(environ, nproc_per_node, num_nodes)
    return found or None


def node_environment(
    environ: Mapping[str, str] | None = None, *, nproc_per_node: int | None = None
) -> NodeEnvironment | None:
    """Return the rank of this node among the nodes of an `srun` step with one task per node or among pods, else None.

    `environ` and `nproc_per_node` are as in `worker_environment`.
    """
    at = Surroundings(os.environ if environ is None else environ, nproc_per_node=nproc_per_node)
    answers = (False if entry.is_worker(at.environ) else entry.node(at) for entry in ENVIRONMENTS)
    return next((answer for answer in answers if answer is not None), None) or None


def launch_identity(found: WorkerEnvironment, environ: Mapping[str, str] | None = None) -> str | None:
    """Return an identifier of the start of a foreign launcher that the worker `found` belongs to. Main process only.

    It consists of eight hexadecimal digits, which are the same in each restart and different in any other start. Return None
    if the launcher sets nothing that stays the same in a restart.
    """
    entry = environment_of(found)
    name = "" if entry is None else entry.job(os.environ if environ is None else environ)
    return hashlib.sha256(name.encode()).hexdigest()[:8] if name else None
