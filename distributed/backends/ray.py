"""Train in processes that Ray Train starts and restarts. The step is that of `pytorch-ddp` or `fsdp`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from distributed.backends.base import Refusals
from distributed.backends.ddp import OF_HOOKS, DDPBackend
from distributed.backends.effects import OUR_LAUNCHER, Need, Situation, of_launcher
from distributed.backends.fsdp import FSDPBackend
from distributed.backends.torch_base import PROCESS_GROUPS
from distributed.config.fields import setting

_RAY_PLACES = "Ray chooses the nodes: drop it, and set nproc_per_node to the number of processes in all"


def _launched_with(name: str) -> Need:
    return of_launcher("workers that Ray Train starts", lambda request, _: request.launcher_options.get(name))


def _of_cluster(where: Situation, name: str) -> str:
    """Return why no cluster is joined, or an empty string. Without one the rendezvous of the workers is a file."""
    request = where.request
    return "" if request is None or request.launcher_options.get("address") else "no cluster is joined"


_JOINED = Need("a cluster that is joined", _of_cluster)


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Settings of Ray, and the engine whose step its processes run."""

    engine: str = setting(
        "pytorch-ddp", "whose step the processes run; that backend's options apply too", choices=("pytorch-ddp", "fsdp")
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
    "ray.cpus_per_worker": (_launched_with("cpus"),),
    "ray.callbacks": (_launched_with("callbacks"),),
}
_REFUSES: Refusals = {
    **PROCESS_GROUPS,
    "num_nodes": _RAY_PLACES,
    "node_rank": _RAY_PLACES,
    "gpus_per_node": "Ray chooses the nodes: set num_gpus to the number of GPUs in all",
    "master_addr": "Ray chooses where rank 0 runs: drop it",
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
    refuses: ClassVar[Refusals] = _REFUSES
