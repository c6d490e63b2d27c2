"""Workers by RANK and WORLD_SIZE: those of torchrun and of our own launcher, and those started by hand.

This file also tells which values of RANK and WORLD_SIZE are stale, incomplete, or the number of a pod.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments import horovodrun, openmpi, pod, slurm
from distributed.launching.environments.base import Surroundings, Worker, WorkerEnvironment, number
from distributed.runs.processes import stat_of


def worker(at: Surroundings) -> Worker:
    """Return the rank of this process by RANK and WORLD_SIZE, or None if they do not make it a worker.

    If `nproc_per_node` was given, or RANK is the number of a pod, RANK and WORLD_SIZE count only together with other
    variables that a launcher sets (see `is_bare_rank`). Raises ConfigError for a bare RANK above 0 together with
    `nproc_per_node`, and ResourceError if the variables make no sense.
    """
    environ = at.environ
    if not has_rank(environ):
        return None
    if not is_bare_rank(environ, at.argv) or not (at.nproc_per_node or is_pods_number(environ)):
        _refuse_exported_rank(environ)
        return _from_variables(environ, at.argv)
    if number(environ, "RANK") > 0 and not is_pods_number(environ):
        raise contradicting_rank(environ, at.nproc_per_node)
    return None


def is_worker(environ: Mapping[str, str]) -> bool:
    """Return whether RANK makes this process a worker."""
    return has_rank(environ) and not is_pods_number(environ)


def job(environ: Mapping[str, str]) -> str:
    """Return a name of this start of torchrun: its run id if it has one, otherwise a name of torchrun's process."""
    if "TORCHELASTIC_RESTART_COUNT" not in environ:
        return ""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"torchrun {run_id}" if run_id != "none" else _parent_process()


def _parent_process() -> str:
    """Return a name of torchrun's process, which stays the same when torchrun restarts its workers.

    The name has the host, the boot and the start time, because process ids are reused.
    """
    pid = os.getppid()
    if (stat := stat_of(pid)) is None:
        return ""
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {pid} {stat.started}"


def has_rank(environ: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE are both set."""
    return environ.get("RANK", "") != "" and environ.get("WORLD_SIZE", "") != ""


def is_bare_rank(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return whether RANK and WORLD_SIZE are set without any other variable or argument that launchers give to their workers."""
    return has_rank(environ) and not _is_launched(environ) and not any(map(is_local_rank, argv))


def _is_launched(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_RANK", "") != "" or any(name.startswith("TORCHELASTIC_") for name in environ)


def pass_over_stale_rank(
    environ: MutableMapping[str, str], argv: Sequence[str] | None = None, *, nproc_per_node: int
) -> str | None:
    """Remove a bare RANK=0 and its WORLD_SIZE from `environ`, because `nproc_per_node` was given. Return a line that says so.

    Return None and remove nothing if this process is a worker, if RANK is the number of a pod, or if RANK is above 0.
    """
    is_bare = is_bare_rank(environ, sys.argv if argv is None else argv) and not is_pods_number(environ)
    if not is_bare or number(environ, "RANK") != 0:
        return None
    stale = f"RANK={environ.pop('RANK')} and WORLD_SIZE={environ.pop('WORLD_SIZE')}"
    return f"{stale} in the environment are ignored, because nproc_per_node={nproc_per_node} is given"


def contradicting_rank(environ: Mapping[str, str], nproc_per_node: int | None) -> ConfigError:
    """Return the error for a bare RANK above 0 together with `nproc_per_node`."""
    rank, world_size = environ["RANK"], environ["WORLD_SIZE"]
    return ConfigError(
        f"RANK={rank} and WORLD_SIZE={world_size} in the environment make this process a worker, but"
        f" nproc_per_node={nproc_per_node} asks it to start workers: unset RANK and WORLD_SIZE to start workers here, or drop"
        f" nproc_per_node to make this process rank {rank} (node_rank is the number of a machine)"
    )


def refuse_half_a_rank(environ: Mapping[str, str], nproc_per_node: int | None, num_nodes: int) -> None:
    """Raise ResourceError if only one of RANK and WORLD_SIZE is set and its value means several processes.

    Accept a WORLD_SIZE that equals `nproc_per_node` x `num_nodes`.
    """
    if has_rank(environ):
        return
    rank = environ.get("RANK", "")
    if rank.isdigit() and int(rank) > 0:
        raise ResourceError(f"RANK={rank} without WORLD_SIZE: set WORLD_SIZE to the number of processes, or unset RANK")
    world_size = number(environ, "WORLD_SIZE", 1)
    if world_size in (1, (nproc_per_node or 1) * num_nodes):
        return
    beside = f" beside nproc_per_node={nproc_per_node}" if nproc_per_node else ""
    raise ResourceError(
        f"WORLD_SIZE={world_size} without RANK{beside}: each of {world_size} such processes would train alone. Set RANK to a"
        f" number from 0 to {world_size - 1} (in an indexed Job of Kubernetes JOB_COMPLETION_INDEX serves as RANK), or unset"
        " WORLD_SIZE and start with --nproc-per-node"
    )


def is_pods_number(environ: Mapping[str, str]) -> bool:
    """Return whether RANK is the number of this pod, as Kubeflow sets it for torchrun, and not the rank of a process."""
    return not _is_launched(environ) and pod.numbers_pod(environ)


def is_local_rank(argument: str) -> bool:
    """Return whether `argument` is the `--local_rank=N` that `torch.distributed.launch` adds to a script's arguments."""
    return re.fullmatch(r"--local[-_]rank=\d+", argument) is not None


def _from_variables(environ: Mapping[str, str], argv: Sequence[str]) -> WorkerEnvironment:
    """Return the rank of this process by torchrun's variables, with defaults for all but RANK and WORLD_SIZE."""
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ResourceError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}: number processes from 0, or unset both to start workers here"
        )
    local_world_size = number(environ, "LOCAL_WORLD_SIZE", world_size)
    local_rank = number(environ, "LOCAL_RANK", _local_rank_in(argv, rank % max(1, local_world_size)))
    return WorkerEnvironment(
        rank, local_rank, world_size, local_world_size,
        number(environ, "GROUP_RANK", rank // max(1, local_world_size)),
        environ.get("MASTER_ADDR") or "127.0.0.1", number(environ, "MASTER_PORT", 29500),
        number(environ, "TORCHELASTIC_RESTART_COUNT", 0), "environment",
    )  # fmt: skip


def _local_rank_in(argv: Sequence[str], default: int) -> int:
    return next((int(argument.partition("=")[2]) for argument in argv if is_local_rank(argument)), default)


def _refuse_exported_rank(environ: Mapping[str, str]) -> None:
    """Raise ResourceError for an `export RANK=$SLURM_PROCID` in a batch script: it is 0 in every task of the `srun` that follows."""
    if not slurm.is_task(environ) or openmpi.is_worker(environ) or horovodrun.is_worker(environ):
        return
    if "TORCHELASTIC_RUN_ID" in environ or environ["WORLD_SIZE"] != environ.get("SLURM_NTASKS"):
        return
    if environ["RANK"] != environ["SLURM_PROCID"]:
        raise ResourceError(
            f"RANK={environ['RANK']} contradicts SLURM_PROCID={environ['SLURM_PROCID']}: RANK was exported outside of srun, the"
            " same for all tasks: drop 'export RANK' and 'export LOCAL_RANK', then SLURM_PROCID and SLURM_LOCALID are used"
        )
