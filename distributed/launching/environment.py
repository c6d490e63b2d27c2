"""Notices whether this process already is a worker of some launcher, so that it does not launch again."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.errors import ResourceError
from distributed.launching import pods
from distributed.launching.variables import (
    contradicting_rank,
    has_rank,
    is_bare_rank,
    is_local_rank,
    is_pods_number,
    number,
    refuse_half_a_rank,
)

_SLURM_NOT_A_STEP = {"", "4294967290", "4294967291", "4294967292", "-5", "-6", "-4"}  # batch, interactive, external


@dataclasses.dataclass(frozen=True)
class WorkerEnvironment:
    """This process among the workers that a launcher started, and where they meet."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    restart_count: int
    source: (
        str  # "environment" (torchrun, ours, RANK set by hand), "slurm", "openmpi", "horovodrun", "TF_CONFIG", "pod"
    )

    def to_environ(self) -> dict[str, str]:
        """The variables that a plain torchrun script reads."""
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
        """All that torchrun gives to its workers."""
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
    """One task or pod per node: this process is to launch the workers of its node."""

    num_nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    nproc_per_node: int | None = None  # None where the environment does not say


def worker_environment(
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
    *,
    nproc_per_node: int | None = None,
    num_nodes: int = 1,
) -> WorkerEnvironment | None:
    """Return what this process is as a worker, or None where it is to launch workers itself.

    RANK and WORLD_SIZE win; then Open MPI; then horovodrun; then a step of `srun`, as `mpirun` and `horovodrun` may stand
    in one (in the shell of `srun --pty`); then a TF_CONFIG of several workers, which wins over a step of one task too; then
    the variables of a pod. `nproc_per_node` is the number of processes that somebody explicitly asked for, on each of
    `num_nodes` nodes. Beside it one Slurm task or pod per node launches its node (see `node_environment`), and RANK and
    WORLD_SIZE count only together with what a launcher sets beside them (see `is_bare_rank`).

    Raises ResourceError where the variables make no sense, and where WORLD_SIZE names several processes and nothing says
    which one this is. Raises ConfigError for a bare RANK above 0 beside `nproc_per_node`.
    """
    environ = os.environ if environ is None else environ
    argv = sys.argv if argv is None else argv
    if has_rank(environ):
        if not is_bare_rank(environ, argv) or not (nproc_per_node or is_pods_number(environ)):
            _refuse_exported_rank(environ)
            return _from_variables(environ, argv)
        if number(environ, "RANK") > 0 and not is_pods_number(environ):
            raise contradicting_rank(environ, nproc_per_node)
    found = _from_other_launchers(environ, nproc_per_node)
    if found is not None or node_environment(environ, nproc_per_node=nproc_per_node) is not None:
        return found
    if not has_rank(environ):
        refuse_half_a_rank(environ, nproc_per_node, num_nodes)
    return None


def _from_other_launchers(environ: Mapping[str, str], nproc_per_node: int | None) -> WorkerEnvironment | None:
    if _is_openmpi(environ):
        return _from_openmpi(environ)
    if _is_horovod(environ):
        return _from_horovod(environ)
    if _is_slurm_step(environ):
        if (nproc_per_node or 1) > 1 and _one_task_per_node(environ):
            return None
        is_alone = number(environ, "SLURM_NTASKS", 1) == 1
        return (_from_tensorflow(environ) if is_alone else None) or _from_slurm(environ)
    return _from_tensorflow(environ) or (None if nproc_per_node else _from_pod(environ))


def node_environment(
    environ: Mapping[str, str] | None = None, *, nproc_per_node: int | None = None
) -> NodeEnvironment | None:
    """Return this node among the nodes of an `srun` step with one task per node, or among pods, or None.

    `nproc_per_node` is as in `worker_environment`.
    """
    environ = os.environ if environ is None else environ
    is_worker = has_rank(environ) and not is_pods_number(environ)
    if is_worker or _is_openmpi(environ) or _is_horovod(environ):
        return None
    if _is_slurm_step(environ):
        if not _one_task_per_node(environ):
            return None
        addr, port = _slurm_meeting_point(environ)
        return NodeEnvironment(number(environ, "SLURM_NTASKS", 1), number(environ, "SLURM_PROCID"), addr, port)
    pod = pods.find_node(environ, nproc_per_node)
    return None if pod is None else NodeEnvironment(*dataclasses.astuple(pod))


def expand_hostlist(text: str) -> list[str]:
    """Slurm's compressed list of hosts as single names: `n[01-03,7],gpu1` -> n01, n02, n03, n7, gpu1."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts.extend(_expand(item))
    return hosts


def _expand(item: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if not match:
        return [item]
    head, ranges, tail = match.groups()
    names = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        names += [f"{head}{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    return [name + rest for name in names for rest in _expand(tail)]


def _from_variables(environ: Mapping[str, str], argv: Sequence[str]) -> WorkerEnvironment:
    rank, world_size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ResourceError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}: number processes from 0, or unset both to launch here"
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


def _is_openmpi(environ: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_RANK" in environ and "OMPI_COMM_WORLD_SIZE" in environ


def _is_horovod(environ: Mapping[str, str]) -> bool:
    return "HOROVOD_RANK" in environ and "HOROVOD_SIZE" in environ


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """A batch shell has SLURM_PROCID=0 too; only an `srun` step has a real step number."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step not in _SLURM_NOT_A_STEP and "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM_PROCID is that of a task, also where SLURM_STEP_ID was not passed on, as to a container.

    The shell of a batch script has SLURM_PROCID=0, so that any other number is a task's.
    """
    return _is_slurm_step(environ) or number(environ, "SLURM_PROCID", 0) > 0


def _one_task_per_node(environ: Mapping[str, str]) -> bool:
    nodes = number(environ, "SLURM_STEP_NUM_NODES", number(environ, "SLURM_NNODES", 1))
    return number(environ, "SLURM_NTASKS", 1) == nodes


def _from_slurm(environ: Mapping[str, str]) -> WorkerEnvironment:
    addr, port = _slurm_meeting_point(environ)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or environ["SLURM_NTASKS"]
    node = number(environ, "SLURM_NODEID", 0)
    return WorkerEnvironment(
        number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0), number(environ, "SLURM_NTASKS"),
        _tasks_on(tasks, node), node, addr, port, number(environ, "SLURM_RESTART_COUNT", 0), "slurm",
    )  # fmt: skip


def _slurm_meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Host of the step's first node, and a port that every task of the step computes alike."""
    nodes = (
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    )
    hosts = expand_hostlist(nodes)
    addr = environ.get("MASTER_ADDR") or (hosts[0] if hosts else environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    key = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return addr, number(environ, "MASTER_PORT", _derived_port(key))


def _refuse_exported_rank(environ: Mapping[str, str]) -> None:
    """`export RANK=$SLURM_PROCID` in a batch script is 0 in every task of the `srun` that follows."""
    if not _is_slurm_task(environ) or _is_openmpi(environ) or _is_horovod(environ):
        return
    if "TORCHELASTIC_RUN_ID" in environ or environ["WORLD_SIZE"] != environ.get("SLURM_NTASKS"):
        return
    if environ["RANK"] != environ["SLURM_PROCID"]:
        raise ResourceError(
            f"RANK={environ['RANK']} contradicts SLURM_PROCID={environ['SLURM_PROCID']}: RANK was exported outside of srun, the"
            " same for all tasks: drop 'export RANK' and 'export LOCAL_RANK', SLURM_PROCID and SLURM_LOCALID count then"
        )


def _tasks_on(tasks_per_node: str, node: int) -> int:
    """Tasks of node number `node` in Slurm's `2(x3),1`."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1


def _from_openmpi(environ: Mapping[str, str]) -> WorkerEnvironment:
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
        rank // max(1, local_world_size), addr, number(environ, "MASTER_PORT", _derived_port(job)), 0, "openmpi",
    )  # fmt: skip


def _from_horovod(environ: Mapping[str, str]) -> WorkerEnvironment:
    """horovodrun over Gloo (over MPI it is mpirun). Its own server is where others may meet too."""
    server = environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or "127.0.0.1"
    job = f"{server}:{environ.get('HOROVOD_GLOO_RENDEZVOUS_PORT', '')}"
    is_one_node = number(environ, "HOROVOD_CROSS_SIZE", 1) == 1
    return WorkerEnvironment(
        number(environ, "HOROVOD_RANK"), number(environ, "HOROVOD_LOCAL_RANK", 0), number(environ, "HOROVOD_SIZE"),
        number(environ, "HOROVOD_LOCAL_SIZE", 1), number(environ, "HOROVOD_CROSS_RANK", 0),
        environ.get("MASTER_ADDR") or ("127.0.0.1" if is_one_node else server),
        number(environ, "MASTER_PORT", _derived_port(job)), 0, "horovodrun",
    )  # fmt: skip


def _from_pod(environ: Mapping[str, str]) -> WorkerEnvironment | None:
    """One process in each pod."""
    pod = pods.find_worker(environ)
    if pod is None:
        return None
    return WorkerEnvironment(
        pod.index, 0, pod.num_pods, 1, pod.index, pod.master_addr, pod.master_port, 0, "pod"
    )  # fmt: skip


def _from_tensorflow(environ: Mapping[str, str]) -> WorkerEnvironment | None:
    """None where TF_CONFIG names one worker or makes no sense, which is the business of TensorFlow's backend."""
    text = environ.get("TF_CONFIG", "")
    cluster = read_tf_config(text) if text else None
    if not isinstance(cluster, TFCluster) or len(cluster.addresses) < 2:
        return None
    hosts = [address.rpartition(":")[0].strip("[]") for address in cluster.addresses]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[cluster.rank]]
    port = number(environ, "MASTER_PORT", _derived_port(",".join(cluster.addresses)))
    return WorkerEnvironment(
        cluster.rank, here.index(cluster.rank), len(hosts), len(here), list(dict.fromkeys(hosts)).index(hosts[cluster.rank]),
        hosts[0], port, 0, "TF_CONFIG",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TFCluster:
    """What TF_CONFIG says: the workers' addresses, a chief first, and which of them this process is."""

    addresses: tuple[str, ...]
    rank: int


def read_tf_config(text: str) -> TFCluster | str:
    """The cluster that the value of TF_CONFIG describes, or what is wrong with it."""
    try:
        content = json.loads(text)
        cluster, task = content.get("cluster", {}), content.get("task", {})
        kinds = {kind: list(cluster[kind]) for kind in cluster}
        kind, index = str(task.get("type", "worker")), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError):
        return (
            'it is not of the form {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}'
        )
    if other := kinds.keys() - {"chief", "worker"}:
        return f"its cluster has tasks of the type {min(other)!r}, and only 'worker' and 'chief' train here"
    addresses = [*kinds.get("chief", []), *kinds.get("worker", [])]
    if not all(isinstance(address, str) and re.fullmatch(r"\S+:\d+", address) for address in addresses):
        return "an address in its cluster is not of the form 'HOST:PORT'"
    if len(set(addresses)) < len(addresses):
        return "its cluster names an address twice"
    if not addresses:
        return TFCluster((), 0)
    if len(addresses) > 1 and not {"type", "index"} & set(task):
        return "it has no task, which says which of its workers this process is"
    if not 0 <= index < len(kinds.get(kind, [])):
        return f"its task is {kind} {index}, which its cluster does not have"
    return TFCluster(tuple(addresses), index + (len(kinds.get("chief", [])) if kind == "worker" else 0))


def _derived_port(job: str) -> int:
    return 20000 + zlib.crc32(job.encode()) % 12000  # below the kernel's range of free ports
