"""Pods of Kubernetes: torchrun's PET_ variables, which Kubeflow sets, and the index of an indexed Job.

Each of torchrun's options can be given as a variable: PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR and
PET_MASTER_PORT. Kubeflow also sets RANK, which is then the number of the pod, and WORLD_SIZE, which counts processes.
"""

from __future__ import annotations

from collections.abc import Mapping

from distributed.errors import ResourceError
from distributed.launching.environments.base import Node, NodeEnvironment, Surroundings, Worker, WorkerEnvironment

_DEFAULT_PORT = 29500


def is_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a pod of a job whose pods have numbers."""
    return any(environ.get(name, "") != "" for name in ("JOB_COMPLETION_INDEX", "PET_NNODES"))


def numbers_pod(environ: Mapping[str, str]) -> bool:
    """Return whether RANK is the number of this pod, as Kubeflow sets it."""
    return bool(environ.get("PET_NNODES")) and environ.get("PET_NODE_RANK", "") == environ.get("RANK")


def node(at: Surroundings) -> Node:
    """Return the rank of this pod among the pods if it is to launch workers, otherwise None."""
    environ, nproc_per_node = at.environ, at.nproc_per_node
    if environ.get("PET_NNODES"):
        pod = _from_torchrun_options(environ)
        return pod if (nproc_per_node or pod.nproc_per_node or 1) > 1 or nproc_per_node else None
    if nproc_per_node is None or not _has_index(environ):
        return None
    world_size, index = _number(environ, "WORLD_SIZE"), _number(environ, "JOB_COMPLETION_INDEX")
    if world_size % nproc_per_node or index >= world_size // nproc_per_node:
        raise ResourceError(
            f"WORLD_SIZE={world_size} does not fit {nproc_per_node} processes per pod and"
            f" JOB_COMPLETION_INDEX={index}: WORLD_SIZE counts processes, set it to the number of pods x {nproc_per_node}"
        )
    return NodeEnvironment(world_size // nproc_per_node, index, *_master(environ, ""), None)


def worker(at: Surroundings) -> Worker:
    """Return the rank of this pod if it is itself one worker, and no number of processes per node was given.

    Raises ResourceError if this pod is to run several processes, because a launcher must start them.
    """
    pod = None if at.nproc_per_node else _of_one_process(at.environ)
    if pod is None:
        return None
    return WorkerEnvironment(
        pod.node_rank, 0, pod.num_nodes, 1, pod.node_rank, pod.master_addr, pod.master_port, 0, "pod"
    )  # fmt: skip


def _of_one_process(environ: Mapping[str, str]) -> NodeEnvironment | None:
    """Return the rank of this pod if each pod is one process, else None. Raises ResourceError if it is to run several."""
    if environ.get("PET_NNODES"):
        pod = _from_torchrun_options(environ)
        if (pod.nproc_per_node or 1) > 1:
            raise ResourceError(
                f"PET_NPROC_PER_NODE={pod.nproc_per_node} asks for {pod.nproc_per_node} processes in this pod: start the script"
                " with 'python -m distributed.cli train --script SCRIPT' or torchrun"
            )
        return pod if pod.num_nodes > 1 else None
    if not _has_index(environ):
        return None
    world_size, index = _number(environ, "WORLD_SIZE"), _number(environ, "JOB_COMPLETION_INDEX")
    if index >= world_size:
        raise ResourceError(
            f"JOB_COMPLETION_INDEX={index} is not below WORLD_SIZE={world_size}: set WORLD_SIZE to the Job's completions"
        )
    return NodeEnvironment(world_size, index, *_master(environ, ""), 1)


def _has_index(environ: Mapping[str, str]) -> bool:
    """Return whether this is a pod of an indexed Job whose pods train together.

    The pods of a Job of independent tasks have an index too. Only WORLD_SIZE tells that the pods train together.
    """
    has_size = environ.get("WORLD_SIZE", "") not in ("", "1")
    return has_size and environ.get("RANK", "") == "" and environ.get("JOB_COMPLETION_INDEX", "") != ""


def _from_torchrun_options(environ: Mapping[str, str]) -> NodeEnvironment:
    """Return the rank of this pod by torchrun's PET_ variables. Raises ResourceError if they make no sense."""
    num_pods = _num_nodes(environ["PET_NNODES"])
    if num_pods > 1 and environ.get("PET_NODE_RANK", "") == "":
        raise ResourceError(
            f"PET_NODE_RANK is not set beside PET_NNODES={num_pods}: set it to this pod's number, from 0 to {num_pods - 1}, or"
            " unset PET_NNODES"
        )
    index = _number(environ, "PET_NODE_RANK", 0)
    if index >= num_pods:
        raise ResourceError(f"PET_NODE_RANK={index} is not below PET_NNODES={num_pods}: number the pods from 0")
    addr, port = _master(environ, "PET_") if num_pods > 1 else ("localhost", 0)
    processes = environ.get("PET_NPROC_PER_NODE", "")
    if processes.isdigit():
        return NodeEnvironment(num_pods, index, addr, port, int(processes))
    world_size = _number(environ, "WORLD_SIZE", 0)  # for "auto", Kubeflow sets WORLD_SIZE
    return NodeEnvironment(num_pods, index, addr, port, world_size // num_pods or None)


def _num_nodes(text: str) -> int:
    low, _, high = text.partition(":")
    if not low.isdigit() or int(low) < 1 or high not in ("", low):
        raise ResourceError(
            f"PET_NNODES={text!r} is not a single number of nodes: set one, because a job of pods has as many nodes as pods"
        )
    return int(low)


def _master(environ: Mapping[str, str], prefix: str) -> tuple[str, int]:
    endpoint, _, end = environ.get(f"{prefix}RDZV_ENDPOINT", "").partition(":")
    addr = environ.get(f"{prefix}MASTER_ADDR") or endpoint or environ.get("MASTER_ADDR", "")
    if not addr:
        raise ResourceError(
            "MASTER_ADDR is not set, but the job has several pods: set it to the host name of pod 0, and MASTER_PORT"
        )
    port = environ.get(f"{prefix}MASTER_PORT") or end or environ.get("MASTER_PORT") or str(_DEFAULT_PORT)
    return addr, _number({"MASTER_PORT": port}, "MASTER_PORT")


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if text == "" and default is not None:
        return default
    if not text.isdigit():
        raise ResourceError(f"{name}={text!r} is not a whole number: correct it in the pod's env")
    return int(text)
