"""Train in processes that Ray Train starts and restarts. The step is that of `pytorch-ddp` or `fsdp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from distributed.backends._ray.joining import connected
from distributed.backends.base import If, Refusals
from distributed.backends.ddp import OF_HOOKS, DDPBackend
from distributed.backends.effects import OF_CLUSTER, OUR_LAUNCHER, Need, Situation, of_launcher
from distributed.backends.fsdp import FSDPBackend
from distributed.backends.torch_base import OF_WHOLE_MATRICES, PROCESS_GROUPS
from distributed.config.fields import setting
from distributed.launching.environments.registry import worker_environment

_RAY_PLACES = "one command starts the workers of all nodes: drop it"


def _is_without_cluster(own: Any) -> bool:
    """Return whether this process starts the workers of several nodes, and knows no cluster to join."""
    starts_several = own.config.num_nodes > 1 and worker_environment() is None
    return starts_several and own.config.address is None and connected() is None


def _launched_with(name: str) -> Need:
    return of_launcher("workers that Ray Train starts", lambda request, _: request.launcher_options.get(name))


def _of_cluster(where: Situation, name: str) -> str:
    """Return why the setting has no effect: no cluster is joined, so workers meet through a file. Return "" if one is
    joined."""
    request = where.request
    return "" if request is None or request.launcher_options.get("address") else "no cluster is joined"


_JOINED = Need("a cluster that is joined", _of_cluster)


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Settings of Ray, and the engine whose step its processes run."""

    engine: str = setting(
        "pytorch-ddp", "backend whose step the processes run; its options apply too", choices=("pytorch-ddp", "fsdp")
    )
    cpus_per_worker: float = setting(1.0, "CPUs that Ray reserves for each process", above=0)
    callbacks: str | None = setting(
        None,
        "classes of ray.train.UserCallback that are called after each epoch, as module.Class, separated by commas",
        str,
    )
    report_to_tune: bool = setting(False, "in a trial, report the metrics of each epoch to Ray Tune")


_NEEDS: Mapping[str, tuple[Need, ...]] = {
    "start_timeout": (OUR_LAUNCHER,),
    "master_port": (_JOINED, OUR_LAUNCHER),
    "node_timeout": (_JOINED, OUR_LAUNCHER),
    "wait": (_JOINED, OF_CLUSTER),
    "ray.cpus_per_worker": (_launched_with("cpus"),),
    "ray.callbacks": (_launched_with("callbacks"),),
}
_REFUSES: Refusals = {
    **PROCESS_GROUPS,
    "checkpoint_async": "its checkpoints are written synchronously: drop it, or use backend 'pytorch-ddp' or 'fsdp'",
    "snapshot_every_n_steps": "it keeps no snapshots in memory: drop it, or use backend 'pytorch-ddp' or 'fsdp'",
    "node_rank": _RAY_PLACES,
    "min_nodes": _RAY_PLACES,
    "auto_micro_batch": "Ray counts every restart: set a smaller batch_size, or use backend 'pytorch-ddp' or 'fsdp'",
    "master_addr": "Ray chooses where rank 0 runs: drop it",
    "num_nodes": (
        If(
            "without a cluster to join",
            _is_without_cluster,
            "set address to that of a Ray cluster, or drop it and set nproc_per_node to the number of processes in all",
        ),
    ),
}


class RayBackend(DDPBackend):
    """Run the DDP step in processes that Ray started."""

    Options: ClassVar[type[Any]] = RayOptions
    joins_cluster: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = _NEEDS
    refuses: ClassVar[Refusals] = {**_REFUSES, **OF_HOOKS}


class RayFSDPBackend(FSDPBackend):
    """Run the FSDP2 step in processes that Ray started."""

    Options: ClassVar[type[Any]] = RayOptions
    joins_cluster: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = _NEEDS
    refuses: ClassVar[Refusals] = {**_REFUSES, **OF_WHOLE_MATRICES}
