"""Validate the model on each validation set of a fit, and sum the results over all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.backends.base import TARGET_NAMES, Backend, ShardedData
from distributed.backends.forms import is_array, is_mapping_of_arrays
from distributed.config.plan import BatchPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.metrics.monitor import PREFIX
from distributed.state import MAX, RATE, SEPARATOR, DataRole, Job, MicroBatch, StepResult, Sums, UpdateBatch

_WINDOW = 256  # number of batches whose results are kept before they are summed


def sets_of(val_data: Any, metrics: Iterable[str] = ()) -> dict[str, Any]:
    """Return the validation sets by the prefix of their metrics.

    One data set has the prefix `val_`. A dict of data sets has `val_NAME_` for each of them. A dict of arrays is one data set.

    Args:
        val_data: the validation data of `fit`, or None.
        metrics: the names of the declared metrics.

    Raises:
        ConfigError: `val_data` is a list of data sets, a dict with a wrong name or value, or a dict with two sets that would report
            a value under the same name.
    """
    if val_data is None:
        return {}
    _refuse_sequence(val_data)
    if not isinstance(val_data, Mapping) or is_mapping_of_arrays(val_data):
        return {PREFIX: val_data}
    if not val_data:
        raise ConfigError("val_data={} has no validation set: give {'name': data set}, or drop val_data")
    for name, data in val_data.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise ConfigError(
                f"val_data has a validation set called {name!r}: name it with letters, digits, '_', '-' or '.', because its"
                f" metrics are called {PREFIX}NAME_loss and so on"
            )
        if data is None or is_array(data) or isinstance(data, (str, bytes, int, float)):
            raise ConfigError(
                f"val_data[{name!r}] is {'an array' if is_array(data) else repr(data)}, but each value of a dict must be a"
                " data set: give a DataLoader or a dataset, such as TensorDataset(inputs, targets)"
            )
    sets = {f"{PREFIX}{name}_": data for name, data in val_data.items()}
    _check_names(sets, metrics)
    return sets


def check_targets(job: Job, train_data: Any, sets: Mapping[str, Any]) -> None:
    """Raise ConfigError if the samples of the training data have targets and those of a validation set have none.

    Calls no code of the user. The form of samples is known of a TensorDataset, a list and a table of `datasets`, also in a DataLoader
    that joins samples as torch does, and in a Subset. Does nothing if code of the user reads the batches.

    Args:
        job: the arguments of the Trainer.
        train_data: the training data of `fit`.
        sets: the validation sets by prefix, from `sets_of`.
    """
    if job.training_step is not None or job.collate_fn is not None or job.is_own_loop:
        return
    wanted = _parts_of(train_data)
    for prefix, data in sets.items():
        name = "val_data" if prefix == PREFIX else f"val_data[{prefix.removeprefix(PREFIX).removesuffix('_')!r}]"
        found = _parts_of(data)
        if isinstance(wanted, int) and wanted > 1 and found == 1:
            raise ConfigError(
                f"a sample of {name} has one element, and one of the training data has {wanted}: give the validation samples their targets"
            )
        if isinstance(wanted, list) and isinstance(found, list):
            targets = [each for each in TARGET_NAMES if each in wanted]
            if targets and not set(TARGET_NAMES) & set(found):
                raise ConfigError(
                    f"the samples of {name} have no {targets[0]!r}, and those of the training data have it: add it, because validation"
                    " needs targets too"
                )


def _parts_of(data: Any) -> int | list[Any] | None:
    """Return the number of elements or the names of the entries of a sample, or None if that is not known."""
    while type(data).__module__.startswith("torch.utils.data.") and type(data).__name__ in ("DataLoader", "Subset"):
        if getattr(getattr(data, "collate_fn", None), "__name__", "default_collate") != "default_collate":
            return None
        data = data.dataset
    if type(data).__module__.startswith("torch.utils.data.") and type(data).__name__ == "TensorDataset":
        return len(data.tensors)
    names = getattr(data, "column_names", None) if type(data).__module__.startswith("datasets.") else None
    if isinstance(names, list):
        return names
    first = data[0] if type(data) in (list, tuple) and data else None
    if isinstance(first, Mapping):
        return list(first)
    return len(first) if isinstance(first, (tuple, list)) else None


def _refuse_sequence(val_data: Any) -> None:
    """Raise ConfigError for a list of data sets, or of pairs (name, data set). A list of samples is one data set."""
    if not isinstance(val_data, (list, tuple)):
        return
    sets = [
        each[1] if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) else each
        for each in val_data
    ]
    names = {base.__name__ for each in sets for base in type(each).__mro__}
    if names & {"Dataset", "DataLoader"}:
        raise ConfigError(
            f"val_data is a {type(val_data).__name__} of data sets, but each needs a name of its own, which its metrics get: give a dict,"
            " {'news': data, 'web': data}"
        )


def _check_names(prefixes: Iterable[str], metrics: Iterable[str]) -> None:
    """Raise ConfigError if two validation sets would report the loss or a declared metric under one name.

    Names that only a `training_step` reports are checked in the first validation.
    """
    owners: dict[str, str] = {}
    for prefix in prefixes:
        for metric in dict.fromkeys(("loss", "accuracy", *metrics)):
            if (other := owners.setdefault(f"{prefix}{metric}", prefix)) != prefix:
                one, two = (each.removeprefix(PREFIX)[:-1] for each in (other, prefix))
                raise ConfigError(
                    f"the validation sets {one!r} and {two!r} both report {prefix}{metric}: give one of them another name in val_data"
                )


def evaluation_batch(backend: Backend[Any], data: Any, batch_size: int) -> BatchPlan:
    """Return the batches in which `data` is evaluated: those of a loader, else `batch_size` samples on each rank."""
    size = backend.batch_size_of(data) or batch_size
    return BatchPlan(size, 1, backend.data_parallel_size, size * backend.data_parallel_size)


def shard_of(backend: Backend[Any], prefix: str, data: Any, batch: BatchPlan, config: DistributedConfig) -> ShardedData:
    """Return this rank's part of the validation set whose metrics have `prefix`. The caller closes it. A collective.

    Args:
        backend: the backend of the fit.
        prefix: a prefix that `sets_of` returned.
        data: the data set with that prefix.
        batch: the batches of training.
        config: the settings of the fit.

    Raises:
        ConfigError: the backend does not take such data.
    """
    planned = evaluation_batch(backend, data, batch.batch_size)
    if (most := config.max_validation_batches) is not None:
        # A batch of a loader has the loader's size, so that every world size reads the same samples.
        size = backend.batch_size_of(data) or batch.global_batch_size
        planned = dataclasses.replace(planned, max_samples=most * size, max_batches=most)
    try:
        return backend.shard(data, planned, DataRole.VALIDATION)
    except ConfigError as error:
        if prefix == PREFIX:
            raise
        name, role = prefix.removeprefix(PREFIX)[:-1], DataRole.VALIDATION.value
        raise ConfigError(str(error).replace(role, f"{role}[{name!r}]", 1)) from None


class Validation:
    """The validation sets of a fit on this rank, by the prefix of their metrics."""

    def __init__(self, sets: Mapping[str, ShardedData]) -> None:
        self._sets = sets
        self.prefixes: Sequence[str] = list(sets)
        # The update batches of the next validation for each set of which a batch was read before.
        self._begun: dict[str, Iterable[UpdateBatch]] = {}

    @property
    def has_stream(self) -> bool:
        """Return whether the length of a set is not known."""
        return any(data.num_samples is None for data in self._sets.values())

    def first_names(self, backend: Backend[Any]) -> list[str]:
        """Evaluate one batch of each set, and return the names of the metrics. A collective.

        The batch is kept for the first validation, so that the loader starts its workers only once. Do not call this for a
        stream, because the loader of the stream would then wait until the first validation.
        """
        names: list[str] = []
        for prefix, data in self._sets.items():
            update_batches = data.epoch(0)
            first = next(update_batches)
            self._begun[prefix] = itertools.chain([first], update_batches)
            with backend.own_generators(), backend.logged.trying():
                result = backend.eval_step(first.micro_batches[0])
                backend.logged.attach(result)
                found = names_in(backend.collect([result]))
            names += [f"{prefix}{name}" for name in found]
            backend.measured.begin("val")  # drop what metrics over all samples have kept of this batch
        return names

    def measure(self, backend: Backend[Any], enter: Callable[[], bool]) -> dict[str, float] | None:
        """Return the metrics of all sets, each with the prefix of its set but without `val_`. A collective.

        Returns None if `enter()`, which is called before each batch, returns False.
        """
        measured: dict[str, float] = {}
        for prefix, data in self._sets.items():
            found = evaluate(backend, data, enter, self._begun.pop(prefix, None))
            if found is None:
                return None
            named = {f"{prefix}{name}".removeprefix(PREFIX): value for name, value in found.items()}
            if twice := measured.keys() & named.keys():
                raise ConfigError(
                    f"two validation sets report {PREFIX}{min(twice)}: give one of them another name in val_data"
                )
            measured |= named
        return measured


def evaluate(
    backend: Backend[Any],
    data: ShardedData,
    enter: Callable[[], bool] = lambda: True,
    update_batches: Iterable[UpdateBatch] | None = None,
) -> dict[str, float] | None:
    """Return the loss and the metrics over `data`, in which each sample counts once. A collective; the result is the same on all ranks.

    Returns None if `enter()`, which is called before each batch, returns False. Pass `update_batches` if the reading of `data` has
    already begun.
    """
    backend.measured.begin("val")
    sums: dict[str, list[float]] = {}
    window: list[StepResult] = []

    def settle() -> None:
        add(sums, backend.collect(window))
        window.clear()

    for micro in micro_batches(data.epoch(0) if update_batches is None else update_batches):
        if not enter():
            return None
        result = backend.eval_step(micro)
        if backend.logged.is_pending:
            backend.logged.attach(result)
        window.append(result)
        if len(window) == _WINDOW:  # every rank has the same number of results here
            settle()
    if window:
        settle()
    means = means_of(sums)
    over_all = backend.measured.measure("val", means)
    return means | over_all if over_all is not None else evaluate(backend, data, enter)


def micro_batches(update_batches: Iterable[UpdateBatch]) -> Iterable[MicroBatch]:
    """Yield the micro-batches of all update batches in order."""
    for update_batch in update_batches:
        yield from update_batch.micro_batches


def add(into: dict[str, list[float]], sums: Mapping[str, Sums]) -> None:
    """Add `sums` to `into` step by step, so that the result does not depend on how many steps come at once."""
    for name, pairs in sums.items():
        if MAX in name:
            _keep_largest(into, name.partition(MAX)[0] + MAX, pairs)
            continue
        total, count = into.get(name, (0.0, 0.0))
        for value, number in pairs:
            total += value
            count += number
        into[name] = [total, count]


def _keep_largest(into: dict[str, list[float]], name: str, pairs: Sums) -> None:
    largest, count = into.get(name, (-math.inf, 0.0))
    for value, number in pairs:
        if number and not math.isnan(largest) and not value <= largest:
            largest = value
        count += number
    into[name] = [largest, count]


def names_in(sums: Iterable[str]) -> list[str]:
    """Return the names of the values that `means_of` computes from `sums`."""
    return list(dict.fromkeys(name.partition(SEPARATOR)[0] for name in sums))


def means_of(sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return name -> sum / count, or the sum or the largest value if that was asked for. A mean is NaN if the count is 0."""
    means = {}
    for name, (total, count) in sums.items():
        is_mean = SEPARATOR not in name or name.endswith(RATE)
        means[name.partition(SEPARATOR)[0]] = total if not is_mean else total / count if count else math.nan
    return means
