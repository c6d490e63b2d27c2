"""Start runs on Ray: on an existing cluster, on a cluster of their own, or inside a trial of Ray Tune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from distributed.backends._ray.asking import ask
from distributed.backends._ray.cluster import JOIN_S, check_address, check_placement, unreached
from distributed.backends._ray.joining import connected
from distributed.backends._ray.resources import RayNode, Workers, missing, nodes_of
from distributed.backends._ray.trials import is_in_tune, this_trial, wait_for_thread
from distributed.backends.starting import TorchStarting
from distributed.config.plan import plan_processes
from distributed.errors import ConfigError
from distributed.launching.environments.registry import worker_environment

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.settings import DistributedConfig
    from distributed.state import EpochMetrics


class RayStarting(TorchStarting):
    """Start runs on Ray."""

    def make(self, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
        from distributed.backends.ray import RayBackend, RayFSDPBackend

        config = merged.config
        made: Backend[Any]
        if config.options("ray").engine == "fsdp":
            made = RayFSDPBackend(merged, config.options("fsdp"), plan)
        else:
            made = RayBackend(merged, config.options("ddp"), plan)
        _check_trial(config.options("ray"))
        if config.is_elastic and config.options("ray").callbacks is not None:
            raise ConfigError(
                "ray.callbacks are called by Ray Train, which needs a fixed number of workers here: drop them, or set"
                f" nproc_per_node={config.nproc_per_node}"
            )
        if config.num_nodes > 1 and config.options("ray").callbacks is not None:
            raise ConfigError(
                f"ray.callbacks are called by Ray Train, which num_nodes={config.num_nodes} does not use: drop one of them"
            )
        return made

    def plan(self, config: DistributedConfig) -> ProcessPlan:
        """Return the processes. The GPUs of the cluster count if one is joined, and those of this machine otherwise."""
        address = config.address or connected()
        if address is None or this_trial() is not None:
            return plan_processes(config)
        options, found = config.options("ray"), list[RayNode]()

        def count_gpus() -> int:
            found.extend(_nodes(address, config.start_timeout, is_given=config.address is not None))
            return _gpus_to_plan(config, found)

        plan = plan_processes(config, count_gpus)
        if found and not config.wait:
            is_on_gpu = plan.device == "cuda"
            fewest = config.min_nproc_per_node or plan.nproc_per_node
            workers = Workers(plan.num_nodes, fewest, options.cpus_per_worker, is_on_gpu)
            if (lack := missing(workers, found, f"the Ray cluster at {address}")) is not None:
                raise lack.error()
        return plan

    def groups(self, options: Any) -> tuple[str, ...]:
        return (options.engine,)

    def is_fit_in_workers(self, plan: ProcessPlan) -> bool:
        return plan.world_size > 1 or this_trial() is None

    def launcher(self) -> str:
        trial = this_trial()
        has_own_processes = trial is not None and trial["bundles"] == 1
        # With a single bundle, all resources belong to the trial's own process, so training processes are its children.
        return super().launcher() if has_own_processes else "distributed.backends._ray.launch"

    def launcher_options(self, config: DistributedConfig, plan: ProcessPlan) -> dict[str, Any]:
        options = config.options("ray")
        trial = this_trial()
        if trial is not None and trial["bundles"] == 1:
            return {}
        if trial is not None:
            return {
                "address": trial["address"],
                "placement_group": trial["placement_group"],
                "cpus": options.cpus_per_worker,
            }
        address = config.address or connected()
        check_placement(address, config.min_nproc_per_node or plan.world_size, options.cpus_per_worker)
        return {
            "address": address,
            "cpus": options.cpus_per_worker,
            "callbacks": options.callbacks,
            "wait": config.wait,
        }

    def on_epoch(self, config: DistributedConfig) -> Callable[[EpochMetrics], None] | None:
        return _report if config.options("ray").report_to_tune and is_in_tune() else None


def _nodes(address: str, patience_s: float, *, is_given: bool) -> list[RayNode]:
    """Return the nodes of the cluster. Raises ResourceError if it cannot be reached.

    Unless the settings give the address, this process may be connected to the cluster already.
    """
    client, ray = sys.modules.get("ray.util.client"), sys.modules.get("ray")
    is_client = client is not None and client.ray.is_connected()
    if not is_given and ray is not None and (is_client or ray.is_initialized()):
        return nodes_of(ray.nodes())
    check_address(address)
    try:
        return nodes_of(ask(address, min(patience_s, JOIN_S)))
    except (ConnectionError, TimeoutError) as error:
        raise unreached(address, str(error)) from None


def _gpus_to_plan(config: DistributedConfig, nodes: Sequence[RayNode]) -> int:
    """Return the number of GPUs of each node for `plan_processes`: those of all nodes together if Ray chooses the nodes.

    If the settings want GPUs, or the cluster has some, the number is at least the one that the settings need, so that
    `plan_processes` does not refuse them. `missing` then reports what is missing.
    """
    sizes = sorted((int(node.gpus) for node in nodes), reverse=True)
    if config.num_nodes == 1:
        there = sum(sizes)
    else:
        there = sizes[config.num_nodes - 1] if config.num_nodes <= len(sizes) else 0
    wants_gpus = bool(config.num_gpus or config.gpus_per_node or config.device == "cuda")
    if not wants_gpus and not any(sizes):
        return 0
    of_node = -(-config.num_gpus // config.num_nodes) if config.num_gpus else 1
    return max(there, config.gpus_per_node or config.nproc_per_node or of_node)


def _check_trial(options: Any) -> None:
    if options.callbacks is not None and this_trial() is not None:
        raise ConfigError(
            "ray.callbacks are called by Ray Train, which a trial of Ray Tune does not use: give tune.run callbacks, or drop it"
        )
    if options.report_to_tune and worker_environment() is None and not is_in_tune():
        raise ConfigError(
            "ray.report_to_tune=True works in a trial of Ray Tune only, and this is not one: drop it, or make the trainer in the function that"
            " is passed to tune.run"
        )


def _report(metrics: EpochMetrics) -> None:
    """Report an epoch to Ray Tune and wait until Tune has received it. Raises SystemExit if Tune stops the trial."""
    from ray import tune

    wait_for_thread()
    tune.report(dict(metrics))
