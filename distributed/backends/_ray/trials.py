"""Find out whether this process runs a trial of Ray Tune and with which resources, and make Ray Tune wait for its end."""

from __future__ import annotations

import sys
from typing import Any


def this_trial() -> dict[str, Any] | None:
    """Return the address and placement group of the Ray actor or task in which this code runs, such as a trial of Ray
    Tune. Return None outside of Ray's workers."""
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


def is_in_tune() -> bool:
    """Return True in a trial of Ray Tune that runs a function. Trials of other kinds cannot call `tune.report`."""
    reporting = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    return reporting is not None and bool(reporting._in_tune_session())


def wait_for_thread() -> None:
    """Make Ray Tune wait for the training thread of this trial before it ends the process or runs another trial in it.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray Tune waits by itself): Ray Tune waits only a limited time for
    the thread, or not at all, although a save may take ten minutes.
    """
    from ray.train._internal.session import get_session

    thread = get_session().training_thread
    thread.join = lambda timeout=None: type(thread).join(thread)
