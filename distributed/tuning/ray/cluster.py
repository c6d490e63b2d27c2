"""The cluster that a sweep runs on (one that it joins, or its own), and the resources that the cluster has for trials."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed.backends._ray.cluster import LOCAL_OBJECT_STORE_BYTES, new_scratch, own_token, start_own
from distributed.backends._ray.joining import join
from distributed.config.registry import import_library
from distributed.tuning.plan import SweepPlan, check_fits, here, total
from distributed.tuning.ray.schedulers import STOPPING_S

_QUIET = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}


def has_own_cluster(address: str | None) -> bool:
    """Return True if a sweep with this `address` would start its own cluster, because there is none to join."""
    return _named(address) is None and not is_connected()


def address_of(plan: SweepPlan) -> str | None:
    """Return the address of the cluster that the sweep is to join, or None if no address was given."""
    return _named(plan.address)


def _named(address: str | None) -> str | None:
    chosen = address or os.environ.get("RAY_ADDRESS") or None
    return None if chosen == "local" else chosen


def is_connected() -> bool:
    """Return whether this process is connected to a cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


@contextlib.contextmanager
def environment(is_own: bool) -> Iterator[None]:
    """Set the variables that Ray reads at import, for this process and for its own cluster. Restore them afterwards."""
    before = dict(os.environ)
    os.environ.update({
        "RAY_AIR_NEW_OUTPUT": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1", "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_FORCE_TRIAL_CLEANUP_S": str(STOPPING_S), "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    })  # fmt: skip
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_own:
        os.environ.update(own_token())
        _read_token_again()
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if is_own:
            _read_token_again()


def _read_token_again() -> None:
    """Make Ray read its authentication mode and token again.

    Workaround (Ray 2.60, no upstream issue known; may go when `ray.init` takes the token as an argument): Ray caches
    the mode at import and the token at the first connection. The two calls are in the order of
    ray/_private/authentication_test_utils.py: a thread that is still ending may read the token between them.
    """
    if "ray" in sys.modules:
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def joined(plan: SweepPlan) -> Iterator[Any]:
    """Yield Ray, connected to the cluster of this process, to the cluster at the plan's address, or to its own new
    cluster."""
    with without_advice():
        ray = import_library("ray", "ray")
    if ray.is_initialized():
        yield ray
        return
    scratch: Path | None = None
    # Workaround (Ray 2.60, ray-project/ray#17308; may go when Ray keeps a handler of SIGTERM): Ray replaces the handler
    # of SIGTERM by its own, which ends the process at once.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        if (address := address_of(plan)) is not None:
            join(ray, address, **_QUIET)
        else:
            scratch = plan.scratch or new_scratch()
            start_own(ray, scratch, _own_cpus(plan), LOCAL_OBJECT_STORE_BYTES, **_QUIET)
        if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        yield ray
    finally:
        ray.shutdown()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def _own_cpus(plan: SweepPlan) -> int:
    """Return the CPUs of the sweep's own cluster: no more than the trials that may run at once need."""
    there, cpus = int(here()["CPU"]), total(plan.bundles).get("CPU", 0.0)
    return min(there, math.ceil(cpus * plan.max_concurrent)) if cpus and plan.max_concurrent else there


def with_gpus(ray: Any, plan: SweepPlan) -> SweepPlan:
    """Return `plan` with a share of the GPUs for each trial if the cluster has GPUs and the user did not say how
    many."""
    if not plan.gpus_if_any or not ray.cluster_resources().get("GPU"):
        return plan
    first, *others = plan.bundles
    return dataclasses.replace(plan, bundles=({**first, "GPU": plan.gpus_if_any}, *others))


def resources(ray: Any, plan: SweepPlan) -> dict[str, float]:
    """Return the resources of the cluster. Raises ResourceError if a bundle fits on no node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in plan.bundles:
        largest = max(nodes, key=lambda node: min(node.get(name, 0.0) - amount for name, amount in bundle.items()))
        check_fits(bundle, largest, "the largest node of the cluster")
    return {name: float(amount) for name, amount in ray.cluster_resources().items()}


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence the advice to install notebook widgets, which are not used here.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray gives the advice only where it shows widgets): it comes when Ray is
    imported.
    """
    advisor = logging.getLogger("ray.widgets")
    before = advisor.level
    advisor.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # tqdm issues this warning
            yield
    finally:
        advisor.setLevel(before)
