"""Read what the Ray workers of an attempt say when they connect: whether they can train together, and the ranks, names and GPUs of
their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from distributed.backends._ray.rendezvous import WorkerConnections
from distributed.launching.environments.base import WorkerEnvironment


def objection(workers: Mapping[int, WorkerConnections], run_dir: Path) -> str | None:
    """Return why these workers cannot train together, or None."""
    for rank, worker in workers.items():
        if not worker.hello["sees_run"]:
            return (
                f"run directory {str(run_dir)!r} is not visible to rank {rank} on {worker.hello['host']}: run from a directory that all"
                " nodes of the cluster share"
            )
    first = workers[0].hello
    for rank, worker in workers.items():
        pairs = ", ".join(
            f"{name} {version} there and {first['versions'][name]} on {first['host']}"
            for name, version in worker.hello["versions"].items()
            if version != first["versions"][name]
        )
        if pairs:
            return f"the node of rank {rank} ({worker.hello['host']}) differs from that of rank 0: {pairs}"
    return None


def node_names(workers: Mapping[int, WorkerConnections]) -> dict[int, str]:
    """Return rank -> name of its node: the host name, with the address if several nodes have the same host name."""
    hosts = {worker.hello["node"]: worker.hello["host"] for worker in workers.values()}
    return {
        rank: worker.hello["host"]
        if list(hosts.values()).count(worker.hello["host"]) == 1
        else f"{worker.hello['host']} ({worker.hello['address']})"
        for rank, worker in workers.items()
    }


def gpus_beside(worker: WorkerConnections, workers: Iterable[WorkerConnections]) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES with the GPUs of all workers on the node of `worker`.

    As under torchrun, every worker sees all of them, and LOCAL_RANK selects its own. Ray would show a worker only its
    own GPU. The GPUs are sorted by their numbers, so that a rank has the same GPU after a restart: Ray gives the tasks of a
    further attempt the GPUs in the order in which the tasks start.
    """
    gpus = [gpu for other in workers if other.hello["node"] == worker.hello["node"] for gpu in other.hello["gpus"]]
    in_order = sorted(gpus, key=lambda gpu: (int(gpu) if gpu.isdecimal() else -1, gpu))
    return {"CUDA_VISIBLE_DEVICES": ",".join(in_order)} if gpus else {}


def environments_of(
    workers: Mapping[int, WorkerConnections], master_port: int | None, attempt: int
) -> list[WorkerEnvironment]:
    """Return the environment of every rank. Ray Train gives the workers of one node consecutive ranks.

    Args:
        workers: rank -> the connections with its worker.
        master_port: the port at which the ranks meet, or None for one that the worker of rank 0 has found free.
        attempt: the number of the attempt, from 0.
    """
    nodes = list(dict.fromkeys(worker.hello["node"] for worker in workers.values()))
    first = workers[0].hello
    environments: list[WorkerEnvironment] = []
    for rank, worker in workers.items():
        beside = [other for other, one in workers.items() if one.hello["node"] == worker.hello["node"]]
        environments.append(
            WorkerEnvironment(
                rank, beside.index(rank), len(workers), len(beside), nodes.index(worker.hello["node"]),
                first["address"], master_port or first["port"], attempt, "environment",
            )
        )  # fmt: skip
    return environments
