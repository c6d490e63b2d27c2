"""The nodes of a Ray cluster, and whether the workers of a run fit on them. Loads no Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributed.errors import ResourceError

_MOST_NAMED = 8  # nodes that a message lists


@dataclasses.dataclass(frozen=True)
class RayNode:
    """A node of a Ray cluster that is alive, with all its resources, also those in use."""

    id: str
    name: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        gpus = f"{_count(self.gpus, 'GPU')}, " if self.gpus else ""
        return f"{self.name}: {gpus}{_count(self.cpus, 'CPU')}"


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a run, and what Ray reserves for each.

    Attributes:
        num_nodes: the number of nodes, each with `per_node` workers. With 1, Ray chooses the nodes of all workers.
        per_node: workers of each node.
        cpus: CPUs of each worker.
        is_on_gpu: whether each worker gets a GPU.
    """

    num_nodes: int
    per_node: int
    cpus: float
    is_on_gpu: bool

    @property
    def resources(self) -> dict[str, float]:
        """Resources of each worker, by the names that Ray gives them."""
        return {"CPU": self.cpus, **({"GPU": 1.0} if self.is_on_gpu else {})}

    def that_fit_on(self, node: RayNode) -> int:
        """Return how many workers fit on `node`."""
        by_cpus = int(node.cpus / self.cpus + 1e-9)
        return min(by_cpus, int(node.gpus)) if self.is_on_gpu else by_cpus


def nodes_of(listed: Iterable[Mapping[str, Any]]) -> list[RayNode]:
    """Return the alive nodes in `listed`, a result of `ray.nodes()`. Nodes with equal host names are named by address."""
    alive = [each for each in listed if each["Alive"]]
    hosts = [each["NodeManagerHostname"] for each in alive]
    return [
        RayNode(
            each["NodeID"],
            each["NodeManagerHostname"] if hosts.count(each["NodeManagerHostname"]) == 1 else each["NodeManagerAddress"],
            each["Resources"].get("CPU", 0.0),
            each["Resources"].get("GPU", 0.0),
        )
        for each in alive
    ]  # fmt: skip


def listed(nodes: Sequence[RayNode]) -> str:
    """Return the nodes with their resources in one line."""
    more = len(nodes) - _MOST_NAMED
    return "; ".join([*map(str, nodes[:_MOST_NAMED]), *([f"{more} more nodes"] if more > 0 else [])]) or "no node"


@dataclasses.dataclass(frozen=True)
class Missing:
    """Resources that the workers of a run need and a cluster lacks: one line, and how to set the run so that it fits."""

    what: str
    fix: str

    def error(self) -> ResourceError:
        """Return the error with `what` and `fix` as its message."""
        return ResourceError(f"{self.what}: {self.fix}")


def check_cpus(processes: int, cpus: float, there: float, where: str) -> None:
    """Raise ResourceError if there are too few CPUs.

    Workaround (Ray 2.60, ray-project/ray#38984; may go when Ray raises an error for workers that it cannot place): Ray
    would wait for more CPUs without a time limit.
    """
    if (missing := _missing_cpus(processes, cpus, there, where)) is not None:
        raise missing.error()


def _missing_cpus(processes: int, cpus: float, there: float, where: str) -> Missing | None:
    if processes * cpus <= there:
        return None
    if there < cpus:
        return Missing(
            f"ray.cpus_per_worker={cpus:g} is more than the {there:g} CPUs of {where}", f"set it to {there:g}"
        )
    return Missing(
        f"nproc_per_node={processes} with ray.cpus_per_worker={cpus:g} needs {processes * cpus:g} CPUs, but {where} has {there:g}",
        f"set nproc_per_node={int(there / cpus)}, or ray.cpus_per_worker={int(1000 * there / processes) / 1000:g}",
    )


def missing(workers: Workers, nodes: Sequence[RayNode], where: str) -> Missing | None:
    """Return what is missing if the workers do not fit on `nodes` even when nothing else runs there, or None.

    `where` names the cluster.
    """
    fits = [workers.that_fit_on(node) for node in nodes]
    wait = "or wait for more with --wait SECONDS"
    if workers.num_nodes > 1:
        large = sum(each >= workers.per_node for each in fits)
        gpus = f"{_count(workers.per_node, 'GPU')} and " if workers.is_on_gpu else ""
        what = (
            f"num_nodes={workers.num_nodes} needs as many nodes with {gpus}{_count(workers.per_node * workers.cpus, 'CPU')},"
            f" but {where} has {large or 'none'} ({listed(nodes)})"
        )
        return None if large >= workers.num_nodes else Missing(what, f"set other numbers, {wait}")
    processes, gpus_there = workers.per_node, int(sum(node.gpus for node in nodes))
    if sum(fits) >= processes:
        return None
    if workers.is_on_gpu and gpus_there < processes:
        fewer = f"nproc_per_node={gpus_there}, or " if gpus_there else ""
        return Missing(
            f"nproc_per_node={processes} needs as many GPUs, but {where} has {gpus_there or 'none'} ({listed(nodes)})",
            f"set {fewer}--device cpu, {wait}",
        )
    of_cpus = _missing_cpus(processes, workers.cpus, sum(node.cpus for node in nodes), where)
    return of_cpus or Missing(
        f"{processes} workers with {' and '.join(_count(amount, name) for name, amount in workers.resources.items())} each do not"
        f" fit on the nodes of {where} ({listed(nodes)})",
        f"set nproc_per_node={sum(fits)}, {wait}" if sum(fits) else f"set a smaller ray.cpus_per_worker, {wait}",
    )


def _count(number: float, word: str) -> str:
    return f"{number:g} {word}{'s' * (number != 1)}"
