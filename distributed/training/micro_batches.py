"""Divide the training data into micro-batches of a size for which memory sufficed in earlier attempts of the run."""

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


def shard_to_fit(
    backend: Backend[Any], data: Any, planned: BatchPlan, files: TrainerFiles, leaving: contextlib.ExitStack
) -> tuple[ShardedData, BatchPlan]:
    """Return this rank's part of the training data, and its batch plan. A collective. `leaving` closes the data."""
    limit, times = _largest(backend, files), 0
    while limit and planned.batch_size > limit:
        planned, times = planned.halved(), times + 1
    while True:
        train = leaving.enter_context(contextlib.closing(backend.shard(data, planned, DataRole.TRAINING)))
        if not limit or train.batch.batch_size <= limit:  # the items of a batch sampler set the batch size
            return train, train.batch.halved_already(times)
        planned, times = planned.halved(), times + 1


def _largest(backend: Backend[Any], files: TrainerFiles) -> int:
    """Return how many samples a micro-batch may have, or 0 if nothing is known. A collective."""
    request = launched_by()
    if not backend.config.auto_micro_batch or request is None:
        return 0
    fit = heartbeat().progress.fit
    return files.on_main(lambda: RunDirectory(request.run_dir).largest_micro_batch(fit))
