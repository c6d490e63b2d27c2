"""Micro-batches that fit into memory, as far as earlier attempts of the launch have found out (`auto_micro_batch`)."""

from __future__ import annotations

import contextlib
from typing import Any

from distributed.backends.base import Backend, ShardedData
from distributed.config.plan import BatchPlan
from distributed.launching.heartbeat import heartbeat
from distributed.launching.request import launched_by
from distributed.runs.directory import RunDirectory
from distributed.state import DataRole
from distributed.training.files import TrainerFiles


def largest_micro_batch(files: TrainerFiles, *, is_asked: bool) -> int:
    """Return how many samples a micro-batch of this fit may have, or 0 if nothing is known or asked. A collective."""
    request = launched_by()
    if not is_asked or request is None:
        return 0
    fit = heartbeat().progress.fit
    return files.on_main(lambda: RunDirectory(request.run_dir).largest_micro_batch(fit))


def shard_to_fit(
    backend: Backend[Any], data: Any, planned: BatchPlan, limit: int, leaving: contextlib.ExitStack
) -> tuple[ShardedData, BatchPlan]:
    """Divide the training data into micro-batches of at most `limit` samples, if it is not 0. A collective.

    Returns the data, which `leaving` closes, and its batch plan.
    """
    times = 0
    while limit and planned.batch_size > limit:
        planned, times = planned.halved(), times + 1
    while True:
        shard = backend.shard(data, planned, DataRole.TRAINING)
        train = leaving.enter_context(contextlib.closing(shard))
        if not limit or train.batch.batch_size <= limit:  # a batch sampler's items set its size
            return train, train.batch.halved_already(times)
        planned, times = planned.halved(), times + 1
