"""Ray: Ray Train starts the processes and restarts them; the step is that of `pytorch-ddp` or `fsdp`."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from distributed.backends._ray.cluster import check_place
from distributed.backends.base import Backend, Refusals
from distributed.backends.ddp import OF_HOOKS, DDPBackend
from distributed.backends.effects import OUR_LAUNCHER, Need, Situation, of_launcher
from distributed.backends.fsdp import FSDPBackend
from distributed.backends.torch_base import PROCESS_GROUPS
from distributed.config.fields import setting
from distributed.config.merging import MergedConfig
from distributed.config.plan import ProcessPlan
from distributed.errors import ConfigError
from distributed.launching.environments.registry import worker_environment

_PLACES = "Ray chooses the nodes: drop it, and set nproc_per_node to the number of processes in all"


def _launched_with(name: str) -> Need:
    return of_launcher("workers that Ray Train starts", lambda request, _: request.launcher_options.get(name))


def _of_cluster(where: Situation, name: str) -> str:
    """Return why a cluster is not joined. Workers on a cluster of our own meet in a file."""
    request = where.request
    return "" if request is None or request.launcher_options.get("address") else "no cluster is joined"


_JOINED = Need("a cluster that is joined", _of_cluster)


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """What Ray is asked for, and whose step its processes do."""

    engine: str = setting(
        "pytorch-ddp", "whose step the processes do; that backend's options count too", choices=("pytorch-ddp", "fsdp")
    )
    cpus_per_worker: float = setting(1.0, "CPUs that Ray keeps for each process", above=0)
    callbacks: str | None = setting(
        None, "classes of ray.train.UserCallback that hear of each epoch, as module.Class, with commas", str
    )
    report_to_tune: bool = setting(False, "give each epoch's metrics to Ray Tune, in a trial")


class _OnRay(Backend[Any]):
    """What differs from a backend whose processes our own launcher starts."""

    Options: ClassVar[type[Any]] = RayOptions
    joins_cluster: ClassVar[bool] = True
    needs: ClassVar[Mapping[str, tuple[Need, ...]]] = {
        "start_timeout": (OUR_LAUNCHER,),
        "master_port": (_JOINED, OUR_LAUNCHER),
        "ray.cpus_per_worker": (_launched_with("cpus"),),
        "ray.callbacks": (_launched_with("callbacks"),),
    }
    refuses: ClassVar[Refusals] = {
        **PROCESS_GROUPS,
        "num_nodes": _PLACES,
        "node_rank": _PLACES,
        "gpus_per_node": "Ray chooses the nodes: set num_gpus to the number of GPUs in all",
        "master_addr": "Ray chooses where rank 0 runs: drop it",
    }

    def _refuse(self) -> None:
        super()._refuse()
        options = self.config.options("ray")
        if options.callbacks is not None and _trial() is not None:
            raise ConfigError(
                "ray.callbacks are called by Ray Train, which a trial of Ray Tune does without: give tune.run callbacks, or drop it"
            )
        if options.report_to_tune and worker_environment() is None and not _is_in_tune():
            raise ConfigError(
                "ray.report_to_tune=True works in a trial of Ray Tune, and this is none: drop it, or make the trainer in the function"
                " that tune.run gets"
            )

    @property
    def on_epoch(self) -> Callable[[Mapping[str, Any]], None] | None:
        return _report if self.config.options("ray").report_to_tune and _is_in_tune() else None

    @property
    def is_fit_in_workers(self) -> bool:
        return self.plan.world_size > 1 or _trial() is None

    @property
    def launcher(self) -> str:  # type: ignore[override]
        trial = _trial()
        has_own_processes = trial is not None and trial["bundles"] == 1
        # One bundle holds the trial and all that it may use: its processes are children of the trial itself.
        return super().launcher if has_own_processes else "distributed.backends._ray.launch"

    def launcher_options(self) -> dict[str, Any]:
        options = self.config.options("ray")
        trial = _trial()
        if trial is not None and trial["bundles"] == 1:
            return {}
        if trial is not None:
            return {
                "address": trial["address"],
                "placement_group": trial["placement_group"],
                "cpus": options.cpus_per_worker,
            }
        address = self.config.address or _connected()
        check_place(address, self.plan.world_size, options.cpus_per_worker)
        return {"address": address, "cpus": options.cpus_per_worker, "callbacks": options.callbacks}


class RayBackend(_OnRay, DDPBackend):
    """The DDP step in processes that Ray started."""

    refuses: ClassVar[Refusals] = {**_OnRay.refuses, **OF_HOOKS}

    @classmethod
    def make(cls, merged: MergedConfig, options: Any, plan: ProcessPlan) -> Backend[Any]:
        if options.engine == "fsdp":
            return RayFSDPBackend(merged, merged.config.options("fsdp"), plan)
        return cls(merged, merged.config.options("ddp"), plan)

    @classmethod
    def groups(cls, options: Any) -> tuple[str, ...]:
        return (options.engine,)


class RayFSDPBackend(_OnRay, FSDPBackend):
    """The FSDP2 step in processes that Ray started."""


def _connected() -> str | None:
    """The cluster that the caller is connected to, if any: else RAY_ADDRESS, else one of our own."""
    client = sys.modules.get("ray.util.client")
    if (
        client is not None and client.ray.is_connected()
    ):  # it may not reach the cluster's own address; Ray names this nowhere
        return f"ray://{client.ray.get_context().client_worker._conn_str}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        address: str = ray.get_runtime_context().gcs_address
        return address
    given = os.environ.get("RAY_ADDRESS")
    return given if given and given != "local" else None


def _trial() -> dict[str, Any] | None:
    """The Ray actor or task that this code runs in (a trial of Ray Tune is one) and its resources; None elsewhere."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    if context.worker.mode != ray.WORKER_MODE:
        return None
    group = ray.util.get_current_placement_group()
    return {
        "address": context.gcs_address,
        "placement_group": None if group is None else group.id.hex(),
        "bundles": 1 if group is None else group.bundle_count,
    }


def _is_in_tune() -> bool:
    """Whether this is a trial that runs a function: another kind of trial has no `tune.report`."""
    reporting = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    return reporting is not None and bool(reporting._in_tune_session())


def _report(row: Mapping[str, Any]) -> None:
    """Wait for Tune to take it. Where Tune stops a trial this raises SystemExit."""
    from ray import tune
    from ray.train._internal.session import get_session

    # Then it ends the trial's process without waiting for its thread, though a stop may take ten minutes: have it wait until
    # this one has saved and left.
    thread = get_session().training_thread
    thread.join = lambda timeout=None: type(thread).join(thread)
    tune.report(dict(row))
