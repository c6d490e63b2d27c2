"""Start of a run on Ray: on an existing cluster, on its own one, or inside a trial of Ray Tune."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.backends._ray.cluster import check_placement
from distributed.backends.starting import TorchStarting
from distributed.errors import ConfigError
from distributed.launching.environments.registry import worker_environment

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.settings import DistributedConfig


class RayStarting(TorchStarting):
    """The start of a run on Ray."""

    def make(self, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
        from distributed.backends.ray import RayBackend, RayFSDPBackend

        config = merged.config
        made: Backend[Any]
        if config.options("ray").engine == "fsdp":
            made = RayFSDPBackend(merged, config.options("fsdp"), plan)
        else:
            made = RayBackend(merged, config.options("ddp"), plan)
        _check_trial(config.options("ray"))
        return made

    def groups(self, options: Any) -> tuple[str, ...]:
        return (options.engine,)

    def is_fit_in_workers(self, plan: ProcessPlan) -> bool:
        return plan.world_size > 1 or _trial() is None

    def launcher(self) -> str:
        trial = _trial()
        has_own_processes = trial is not None and trial["bundles"] == 1
        # A single bundle holds the trial with all its resources, so its processes are children of the trial.
        return super().launcher() if has_own_processes else "distributed.backends._ray.launch"

    def launcher_options(self, config: DistributedConfig, plan: ProcessPlan) -> dict[str, Any]:
        options = config.options("ray")
        trial = _trial()
        if trial is not None and trial["bundles"] == 1:
            return {}
        if trial is not None:
            return {
                "address": trial["address"],
                "placement_group": trial["placement_group"],
                "cpus": options.cpus_per_worker,
            }
        address = config.address or _connected()
        check_placement(address, plan.world_size, options.cpus_per_worker)
        return {"address": address, "cpus": options.cpus_per_worker, "callbacks": options.callbacks}

    def on_epoch(self, config: DistributedConfig) -> Callable[[Mapping[str, Any]], None] | None:
        return _report if config.options("ray").report_to_tune and _is_in_tune() else None


def _check_trial(options: Any) -> None:
    if options.callbacks is not None and _trial() is not None:
        raise ConfigError(
            "ray.callbacks are called by Ray Train, which a trial of Ray Tune does not use: give tune.run callbacks, or drop it"
        )
    if options.report_to_tune and worker_environment() is None and not _is_in_tune():
        raise ConfigError(
            "ray.report_to_tune=True works in a trial of Ray Tune only, and this is not one: drop it, or make the trainer in the function that"
            " is passed to tune.run"
        )


def _connected() -> str | None:
    """Return the cluster that the caller is connected to, or the one in RAY_ADDRESS, or None."""
    client = sys.modules.get("ray.util.client")
    if (
        client is not None and client.ray.is_connected()
    ):  # the client may not reach the cluster's own address; Ray has no public name for this one
        return f"ray://{client.ray.get_context().client_worker._conn_str}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        address: str = ray.get_runtime_context().gcs_address
        return address
    from_environ = os.environ.get("RAY_ADDRESS")
    return from_environ if from_environ and from_environ != "local" else None


def _trial() -> dict[str, Any] | None:
    """Return the Ray actor or task in which this code runs, with its resources, or None elsewhere. A trial of Ray
    Tune is one."""
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
    """Return True in a trial of Ray Tune that runs a function. Other trials have no `tune.report`."""
    reporting = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    return reporting is not None and bool(reporting._in_tune_session())


def _report(row: Mapping[str, Any]) -> None:
    """Report an epoch and wait until Tune has taken it. Raises SystemExit if Tune stops the trial."""
    from ray import tune
    from ray.train._internal.session import get_session

    # Ray Tune ends the trial's process without waiting for this thread (Ray 2.60), although a stop may take ten
    # minutes. Make it wait until the thread has saved and left. This can go when Ray Tune waits by itself.
    thread = get_session().training_thread
    thread.join = lambda timeout=None: type(thread).join(thread)
    tune.report(dict(row))
