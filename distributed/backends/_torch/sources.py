"""Read what the user gave as data: the data set, its order, its collate function and its loader."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from distributed.backends._torch import sample_rng
from distributed.backends._torch.collating import PLAIN, Batching
from distributed.backends._torch.fetching import LOADER, SAMPLER, announce_epoch
from distributed.backends._torch.loader_processes import WorkerInit
from distributed.backends.arrays import ArrayBatch, ArrayData, mapped
from distributed.backends.forms import fault_of, is_array, is_mapping_of_arrays
from distributed.config.settings import DistributedConfig
from distributed.data import sample_seed
from distributed.errors import ConfigError
from distributed.state import DataRole

Reduce = Callable[[Mapping[str, float]], dict[str, float]]
_PAIR = "TensorDataset(inputs, targets)"
_EXAMPLE = "give a DataLoader, or a data set such as TensorDataset(inputs, targets)"


def has_state(dataset: Any) -> bool:
    """Return whether a stream tells its position and continues from it."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


def is_of_hugging_face(dataset: Any) -> bool:
    """Return whether the data set is one of the library `datasets`."""
    return type(dataset).__module__.startswith("datasets.")


@dataclasses.dataclass(frozen=True)
class Source:
    """Hold the user's data set and the settings of a DataLoader around it.

    The settings are the collate function, the samplers, the order and the loader processes.
    """

    name: str  # used in messages
    dataset: Any
    collate_fn: Callable[[Any], Any]
    loader: DataLoader[Any] | None  # None if the bare data set was given
    sampler: Any  # the user's sampler, or None for the order of the run
    batch_sampler: Any  # the user's batch sampler, each item of which is one update, or None
    shuffle: bool
    drop_last: bool
    is_for_gpu: bool = False  # whether its batches go to a GPU

    @property
    def is_stream(self) -> bool:
        """Return whether samples can only be read in sequence, not by index."""
        return is_stream(self.dataset)

    @property
    def num_workers(self) -> int:
        """The number of loader processes of each rank."""
        return 0 if self.loader is None else self.loader.num_workers

    @property
    def yields_batches(self) -> bool:
        """Return whether an item of the data set is a whole batch (`batch_size=None`)."""
        return self.loader is not None and self.loader.batch_size is None and self.batch_sampler is None

    @property
    def pin_memory(self) -> bool:
        """Return whether batches are copied into page-locked memory, from which copies to a GPU are faster."""
        return self.is_for_gpu and self.loader is not None and self.loader.pin_memory and torch.cuda.is_available()


def loader_batch_size(data: Any) -> int | None:
    """Return the batch size that a loader sets.

    Return None for data sets, for DataLoader's default of 1 and for batch samplers.
    """
    if not isinstance(data, DataLoader) or data.batch_size == 1:
        return None
    return data.batch_size


def read_source(
    data: Any, config: DistributedConfig, role: DataRole, *, presharded: bool, batching: Batching = PLAIN
) -> Source:
    """Return the parts of `data`, whose samples become batches as `batching` says.

    Raises ConfigError if it is not data or its settings contradict the configuration.
    """
    name, train = role.value, role.is_training
    loader = data if isinstance(data, DataLoader) else None
    has_own_collate = loader is not None and loader.collate_fn is not default_collate
    has_own_collate = has_own_collate or batching.collate_fn is not None
    dataset = loader.dataset if loader is not None else data
    _check_type(dataset, role, loader is not None, has_own_collate)
    collate = batching.collate_of(dataset, loader, name)
    if loader is None:
        wanted = not is_stream(data) if config.shuffle is None else config.shuffle
        shuffle = train and wanted
        if isinstance(data, ArrayData):
            if batching.collate_fn is not None:
                raise ConfigError(
                    "collate_fn makes a batch of a list of samples, and x= has arrays: drop collate_fn, or pass a data set"
                )
            collate = _AsTensors(config.dtype)
        source = Source(name, data, collate, None, None, None, shuffle, False)
    else:
        source = _read_loader(loader, name, config, collate, train=train, presharded=presharded)
    if train:
        _check_settings(source, config)
    return source


class _AsTensors:
    """Return the batches of an ArrayData as tensors, with floats in `dtype`, as Keras's `fit` does."""

    def __init__(self, dtype: str) -> None:
        self._dtype = getattr(torch, dtype)

    def __call__(self, batch: ArrayBatch) -> ArrayBatch:
        return ArrayBatch(mapped(self._tensor, part) for part in batch)

    def _tensor(self, leaf: Any) -> torch.Tensor:
        tensor = torch.as_tensor(leaf)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _read_loader(
    loader: DataLoader[Any],
    name: str,
    config: DistributedConfig,
    collate: Callable[[Any], Any],
    *,
    train: bool,
    presharded: bool,
) -> Source:
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ and not kind.__module__.startswith("torchdata."):
        raise ConfigError(
            f"{name}: {kind.__name__} has its own __iter__, which would not be called, because the Trainer makes the batches:"
            " give its data set with a plain DataLoader(dataset, batch_size=..., collate_fn=...)"
        )
    own_batches = loader.batch_sampler if loader.batch_size is None else None
    if loader.batch_size is None and own_batches is None and not presharded:
        raise ConfigError(
            f"{name}: DataLoader(batch_size=None) yields items that cannot be divided among the ranks: set batch_size in the"
            " loader, or data.presharded=true where each item is a whole batch of its rank alone"
        )
    sampler, shuffle = None, False
    if not is_stream(loader.dataset) and own_batches is None:
        sampler, shuffle = _read_sampler(loader.sampler, name, presharded)
    if not presharded:
        _refuse_sharded(own_batches, name)
        _refuse_sharded(getattr(own_batches, "sampler", None), name)
    if train and config.shuffle is not None and sampler is None:
        shuffle = config.shuffle
    drop_last = loader.drop_last and train
    return Source(name, loader.dataset, collate, loader, sampler, own_batches, shuffle and train, drop_last)


def _read_sampler(sampler: Any, name: str, presharded: bool) -> tuple[Any, bool]:
    """Return (the user's own sampler or None, whether to shuffle).

    torch's plain samplers are replaced by the order of the run.
    """
    if type(sampler) is SequentialSampler:
        return None, False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return None, True
    if type(sampler) is DistributedSampler and not presharded:
        return None, sampler.shuffle
    if not presharded:
        _refuse_sharded(sampler, name)
    return sampler, False


def _refuse_sharded(sampler: Any, name: str) -> None:
    parts = getattr(sampler, "num_replicas", 1)
    if hasattr(sampler, "rank") and isinstance(parts, int) and parts > 1:
        raise ConfigError(
            f"{name}: {type(sampler).__name__} yields one rank's part only, but the Trainer divides the samples among the ranks:"
            " give the sampler of the whole data set, or set data.presharded=true"
        )


def is_stream(dataset: Any) -> bool:
    """Return whether `dataset` can only be read in sequence."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(dataset, "__iter__") and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def _check_type(dataset: Any, role: DataRole, has_loader: bool, has_own_collate: bool) -> None:
    """Raise ConfigError if `dataset` is not a data set.

    `has_own_collate` tells whether the loader has its own collate function.
    """
    name, kind = role.value, type(dataset).__name__
    takes_inputs = role is DataRole.PREDICTION
    pair = f"one tensor of inputs, or {_PAIR}" if takes_inputs else _PAIR
    if isinstance(dataset, tuple) and dataset and all(isinstance(x, torch.Tensor | numpy.ndarray) for x in dataset):
        raise ConfigError(f"{name}: a tuple of arrays is not a data set: give {pair}")
    are_sets = isinstance(dataset, list | tuple) and all(isinstance(each, Dataset | DataLoader) for each in dataset)
    if are_sets and dataset and not has_own_collate:
        raise ConfigError(
            f"{name}: a {kind} of data sets is not a data set: join them with torch.utils.data.ConcatDataset, or call fit for each"
        )
    fault = fault_of(dataset, pair)
    if fault is not None and not (has_own_collate and isinstance(dataset, list)):
        raise ConfigError(f"{name}: {fault}")
    if not (takes_inputs or has_loader or isinstance(dataset, Dataset)) and is_array(dataset):
        what = "a tensor" if isinstance(dataset, torch.Tensor) else "an array"
        raise ConfigError(
            f"{name}: {what} is not a data set: give {_PAIR}, or DataLoader(inputs) where there are no targets"
        )
    if is_mapping_of_arrays(dataset):
        raise ConfigError(f"{name}: a {kind} of arrays is not a data set: give {pair}, or a list of samples as dicts")
    readable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if isinstance(dataset, Mapping) or not readable:
        hint = ": pick one of its splits" if isinstance(dataset, Mapping) else ""
        raise ConfigError(f"{name}: {kind} is not a data set{hint}: {_EXAMPLE}")


def _check_settings(source: Source, config: DistributedConfig) -> None:
    own = source.sampler if source.batch_sampler is None else source.batch_sampler
    if config.shuffle is not None and own is not None:
        raise ConfigError(f"shuffle={config.shuffle} contradicts the loader's {type(own).__name__}: drop one of them")
    if config.shuffle and source.is_stream:
        raise ConfigError("shuffle=True cannot order a stream: shuffle inside the data set, or drop shuffle")
    if isinstance(source.dataset, Iterator) and config.epochs > 1 and config.max_steps is None:
        raise one_shot_error(source, f"epochs={config.epochs}")


def one_shot_error(source: Source, wanted: str) -> ConfigError:
    """Return the error for a generator that would have to be read again."""
    kind = type(source.dataset).__name__
    return ConfigError(
        f"{source.name}: a {kind} can be read only once, and {wanted} reads it again:"
        " give a list, or an IterableDataset whose __iter__ starts from the beginning"
    )


def sample_count(dataset: Any, name: str) -> int:
    """Return `len(dataset)`. Raises ConfigError if the data set has no length."""
    try:
        return len(dataset)
    except TypeError:
        raise ConfigError(
            f"{name}: {type(dataset).__name__} has __getitem__ but no length: add __len__ (samples in an epoch),"
            " or __iter__ in place of __getitem__ for a stream"
        ) from None


def draw_stream(sampler: Iterable[Any], dataset: Any, seed: int, epoch: int, name: str) -> list[Any]:
    """Return the items that a user's sampler yields in `epoch`. They are the same on every rank.

    Its generators are seeded, then restored.
    """
    announce_epoch(sampler, epoch)
    announce_epoch(getattr(sampler, "sampler", None), epoch)
    owned = [getattr(s, "generator", None) for s in (sampler, getattr(sampler, "sampler", None))]
    generators = {id(g): g for g in owned if isinstance(g, torch.Generator)}
    states = {key: g.get_state() for key, g in generators.items()}
    value = sample_seed(seed, epoch, 0, SAMPLER)
    with sample_rng.preserved():
        sample_rng.seed(value)
        for generator in generators.values():
            generator.manual_seed(value >> 1)
        try:
            limit = max(1_000_000, 10 * len(dataset) if hasattr(dataset, "__len__") else 0)
            stream = list(itertools.islice(sampler, limit + 1))
        finally:
            for key, generator in generators.items():
                generator.set_state(states[key])
    if len(stream) > limit:
        kind = type(sampler).__name__
        raise ConfigError(f"{name}: {kind} yields more than {limit} items: give it an end, an epoch needs one")
    return stream


def loader_arguments(source: Source, seed: int, epoch: int) -> dict[str, Any]:
    """Return the arguments to build a user's loader again. Its iterator draws from a separate generator."""
    loader = source.loader
    assert loader is not None
    generator = torch.Generator()
    generator.manual_seed(sample_seed(seed, epoch, 0, LOADER) >> 1)
    arguments: dict[str, Any] = {"num_workers": loader.num_workers, "generator": generator}
    if loader.num_workers > 0:
        arguments.update(
            timeout=loader.timeout,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            worker_init_fn=WorkerInit(source.dataset, loader.worker_init_fn),
        )
    return arguments


def pinned(source: Source, batch: Any) -> Any:
    """Return `batch`, copied to page-locked memory if the loader asks for it."""
    if not source.pin_memory:
        return batch
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def gather(reduce: Reduce, rank: int, world_size: int, *values: int) -> list[list[int]]:
    """Return the `values` of every rank, in the order of ranks. A collective."""
    mine = {f"{rank}.{i}": float(value) for i, value in enumerate(values)}
    names = [[f"{r}.{i}" for i in range(len(values))] for r in range(world_size)]
    sums = reduce({name: mine.get(name, 0.0) for row in names for name in row}) if world_size > 1 else mine
    return [[int(sums[name]) for name in row] for row in names]
