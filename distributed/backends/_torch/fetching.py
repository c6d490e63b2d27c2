"""Fetch the samples at given positions of an epoch as batches.

The randomness of a sample depends on its position only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from distributed.backends._torch import sample_rng
from distributed.data import sample_seed, sample_seeds
from distributed.state import DATA_VERSION

TRAIN, EVALUATION, TRAIN_COLLATE, EVALUATION_COLLATE, STREAM, SAMPLER, LOADER = range(7)  # salts of the seeds


class Fetcher:
    """Fetch and collate the samples of one micro-batch, in the main process or in a loader worker.

    A sample's augmentation depends only on (seed, epoch, position): the global generators of torch, numpy and Python
    are seeded for each sample and restored afterwards. A generator is seeded only if the data set or the collate
    function draws random numbers from it. Until one does, all samples of a batch are read at once. If a batch has
    changed the state of a generator, the batch is read again sample by sample with that generator seeded for each
    sample. All later batches are read in this way. For the collate function the generators are seeded once per
    micro-batch. The data set's own generators are not seeded.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int, *, train: bool) -> None:
        self.dataset = dataset
        self._collate_fn, self._seed = collate_fn, seed
        self._salt, self._collate_salt = (TRAIN, TRAIN_COLLATE) if train else (EVALUATION, EVALUATION_COLLATE)
        self._drawn = 0  # bit mask of the generators that the data set draws from
        self._epoch: int | None = None

    def __call__(self, epoch: int, positions: Sequence[int], keys: Sequence[Any], version: int = DATA_VERSION) -> Any:
        """Return the batch of the samples `keys`, which are at `positions` of the order of `epoch`.

        `version` is that of the order, see `TrainState.data_version`.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            announce_epoch(self.dataset, epoch)
        before = sample_rng.save()
        try:
            while True:
                batch = self._collate_fn(self._seeded(epoch, positions, keys, version))
                moved = sample_rng.drawn(before) & ~self._drawn
                if not moved:
                    return batch
                self._drawn |= moved
                sample_rng.restore(before)
        finally:
            if self._drawn:
                sample_rng.restore(before)

    def _seeded(self, epoch: int, positions: Sequence[int], keys: Sequence[Any], version: int) -> Any:
        """Return the samples and seed the generators for the collate function.

        Only generators that the data set or the collate function is known to draw from are seeded.
        """
        if not self._drawn:
            return self._items(list(keys))
        items = self._seeded_items(epoch, positions, keys, version)
        sample_rng.seed(sample_seed(self._seed, epoch, positions[0], self._collate_salt), self._drawn)
        return items

    def collate(self, epoch: int, position: int, samples: list[Any]) -> Any:
        """Return the batch of `samples` that were read elsewhere. `position` is that of the first sample."""
        with sample_rng.preserved():
            sample_rng.seed(sample_seed(self._seed, epoch, position, self._collate_salt))
            return self._collate_fn(samples)

    def _items(self, keys: list[Any]) -> Any:
        read_several = self._read_several()
        return [self.dataset[key] for key in keys] if read_several is None else read_several(keys)

    def _read_several(self) -> Callable[[list[Any]], Any] | None:
        """Return the method of the data set that reads several samples at once, or None."""
        method = getattr(self.dataset, "__getitems__", None)
        return method if callable(method) else None

    def _seeded_items(self, epoch: int, positions: Sequence[int], keys: Sequence[Any], version: int) -> Any:
        seeds = sample_seeds(self._seed, epoch, positions, self._salt)
        begin = sample_rng.seeder(seeds, self._drawn, version)
        items, dataset, read_several = [], self.dataset, self._read_several()
        for number, key in enumerate(keys):
            begin(number)
            if read_several is None:
                items.append(dataset[key])
                continue
            item = read_several([key])
            if not isinstance(item, list | tuple) or len(item) != 1:  # already collated: seed for the whole batch
                begin(0)
                return read_several(list(keys))
            items.append(item[0])
        return items


def announce_epoch(target: Any, epoch: int) -> None:
    """Call `target.set_epoch(epoch)` if it exists, as for torch's samplers and Hugging Face streams."""
    if callable(set_epoch := getattr(target, "set_epoch", None)):
        set_epoch(epoch)


def indexed_tensors(dataset: Any, collate_fn: Any) -> tuple[tuple[torch.Tensor, ...], Any] | None:
    """Return the tensors behind a TensorDataset or a Subset of one, and the indices into them (None means all samples).

    Return None for any other data set. `[t.index_select(0, i) for t in tensors]` then gives bit for bit the same
    batch as collating single samples, and draws no random number.
    """
    if collate_fn is not default_collate:
        return None
    if type(dataset) is Subset:
        inner = indexed_tensors(dataset.dataset, collate_fn)
        if inner is None:
            return None
        own = numpy.asarray(dataset.indices, dtype=numpy.int64)
        outer = inner[1]
        return inner[0], own if outer is None else outer[own]
    if type(dataset) is not TensorDataset or not dataset.tensors or not all(map(_is_plain, dataset.tensors)):
        return None
    return dataset.tensors, None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dim() > 0
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )
