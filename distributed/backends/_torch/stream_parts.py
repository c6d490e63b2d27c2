"""Read the parts of a stream that its data set returns from `shard`, in this process or in loader processes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import pickle
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from distributed.backends._torch import sample_rng
from distributed.backends._torch.fetching import announce_epoch
from distributed.backends._torch.loader_processes import read_loader
from distributed.backends._torch.sources import Source, has_state, is_of_hugging_face, loader_arguments
from distributed.errors import ConfigError

OFF = "set data.shard_streams=false"
States = list[list[Any]]  # [index, count, samples of the part before the state, state] of each part that a rank reads


@dataclasses.dataclass(frozen=True)
class Hook:
    """Say how a data set is divided by position.

    Attributes:
        shard: returns the part `index` of `count` of a data set: its samples at the positions `index`, `index + count`, ...
        can_skip: whether `skip(count)` of a part skips samples without reading them.
    """

    shard: Callable[[Any, int, int], Any]
    can_skip: bool = True


def hook_of(source: Source) -> Hook | str:
    """Return how the stream of `source` is divided by position, or the reason why it cannot be.

    Raises ConfigError if the data set has a method `shard` that does not take (index, count).
    """
    dataset = source.dataset
    if isinstance(dataset, Iterator):
        return f"{type(dataset).__name__} is an iterator, which cannot be divided"
    if is_of_hugging_face(dataset):
        return _hugging_face(source)
    shard = getattr(dataset, "shard", None)
    if not callable(shard):
        return f"{type(dataset).__name__} has no method shard(index, count)"
    _check_signature(shard, f"{source.name}: {type(dataset).__name__}.shard", {"index": 0, "count": 1})
    return Hook(functools.partial(_part_of, name=source.name))


def _hugging_face(source: Source) -> Hook | str:
    """Return the hook for a stream of Hugging Face whose rows are dropped before they become Python objects.

    Other streams have a reason. If Python code makes the rows, it would run for every row anyway. Loader processes divide the files
    among themselves. If the stream was split for this rank, it is refused later, because the ranks differ.
    """
    from datasets.distributed import split_dataset_by_node

    dataset = source.dataset
    if getattr(dataset, "_distributed", None) is not None:
        return "split_dataset_by_node has divided it already"
    if getattr(getattr(dataset, "_ex_iterable", None), "iter_arrow", None) is None:
        return "its rows come from Python code, such as a function of map() or a generator"
    if source.num_workers:
        return "its DataLoader has num_workers above 0"
    if "strategy" not in inspect.signature(split_dataset_by_node).parameters:
        return "this version of datasets cannot divide its rows"
    return Hook(
        lambda whole, index, count: split_dataset_by_node(whole, index, count, strategy="examples"), can_skip=False
    )


def _check_signature(method: Any, name: str, arguments: dict[str, int]) -> None:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a method of a compiled class may have no signature
        return
    try:
        signature.bind(**arguments)
    except TypeError:
        wanted = f"{name.rpartition('.')[2]}({', '.join(arguments)})"
        raise ConfigError(f"{name}{signature} is not the hook {wanted} of a stream: rename it, or {OFF}") from None


def _part_of(whole: Any, index: int, count: int, name: str) -> Any:
    part = whole.shard(index=index, count=count)
    if (part is whole and count > 1) or not hasattr(part, "__iter__"):
        found = "the whole data set" if part is whole else f"a {type(part).__name__}"
        raise ConfigError(
            f"{name}: {type(whole).__name__}.shard({index}, {count}) returned {found}: return another data set, which yields"
            f" the samples at positions {index}, {index + count}, ... of this one"
        )
    return part


@dataclasses.dataclass(frozen=True)
class Lane:
    """One part of a stream, from its sample `start` on."""

    dataset: Any
    hook: Hook
    name: str
    index: int
    count: int
    start: int  # samples of the part that were used before
    epoch: int
    seed: int  # of the global generators while the part is read, the same for all parts
    sought: tuple[int, Any] | None = None  # (samples, state), from which the part may continue

    def opened(self) -> tuple[Any, Iterator[Any]]:
        """Return the part and an iterator of its samples from `start` on. Reading the first sample opens the part."""
        part = self.hook.shard(self.dataset, self.index, self.count)
        announce_epoch(part, self.epoch)
        before = self.start
        if self._can_skip(part) and before:
            part, before = self._skipped(part, before), 0
        elif self.sought is not None and callable(getattr(part, "load_state_dict", None)):
            at, state = self.sought
            part.load_state_dict(copy.deepcopy(state))
            before -= at
        return part, itertools.islice(_items(part), before, None)

    def state(self, part: Any, randomness: sample_rng.OwnStream) -> Any:
        """Return the state of `part` for a checkpoint. Return None if it has no state, or if the state may be incomplete."""
        if not has_state(part) or self._can_skip(part) or randomness.has_drawn:
            return None
        state = copy.deepcopy(part.state_dict())
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            return None
        return state

    def _can_skip(self, part: Any) -> bool:
        return self.hook.can_skip and callable(getattr(part, "skip", None))

    def _skipped(self, part: Any, count: int) -> Any:
        name = f"{self.name}: {type(part).__name__}.skip"
        _check_signature(part.skip, name, {"count": 0})
        rest = part.skip(count=count)
        if not hasattr(rest, "__iter__"):
            raise ConfigError(
                f"{name}({count}) returned a {type(rest).__name__}: return a data set without the first {count} samples"
            )
        announce_epoch(rest, self.epoch)
        return rest


def _items(part: Any) -> Iterator[Any]:
    """Yield the samples of `part`. The data set is opened at the first one."""
    yield from part


class PartInProcess:
    """Read one part in this process."""

    fault: str | None = None

    def __init__(self, lane: Lane) -> None:
        self._lane, self._at = lane, lane.start
        self._randomness = sample_rng.OwnStream(lane.seed)
        self._has_state = True
        with self._randomness:
            self._part, self._items = lane.opened()

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end."""
        with self._randomness:
            found = list(itertools.islice(self._items, count))
        self._at += len(found)
        return found

    def states(self) -> States:
        """Return the states from which a resume may continue after the samples that were taken."""
        state = self._lane.state(self._part, self._randomness) if self._has_state else None
        self._has_state = state is not None  # a part that has drawn random numbers has no valid state from then on
        return [] if state is None else [[self._lane.index, self._lane.count, self._at, state]]

    def close(self) -> None:
        """Stop reading."""
        self._items = iter(())


class PartsInWorkers:
    """Read one part in each loader process, and put their samples into the order of the stream."""

    fault: str | None = None

    def __init__(self, lanes: list[Lane], source: Source, size: int) -> None:
        lane = lanes[0]
        loader: DataLoader[Any] = DataLoader(
            _Chunks(lanes, size),
            batch_size=None,
            collate_fn=_unchanged,
            **loader_arguments(source, lane.seed, lane.epoch),
        )
        self._lanes = lanes
        self._chunks: Generator[bytes, None, None] = read_loader(loader)
        self._waiting: list[collections.deque[Any]] = [collections.deque() for _ in lanes]
        # For each lane, the chunk that holds the next sample and all later chunks, as (samples before the chunk, state).
        self._begun: list[collections.deque[tuple[int, Any]]] = [collections.deque() for _ in lanes]
        self._taken = [each.start for each in lanes]
        self._is_at_end = [False] * len(lanes)
        self._next = 0  # the lane of the next sample

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples, or fewer at the end."""
        found: list[Any] = []
        while len(found) < count and self._is_filled(self._next):
            found.append(self._waiting[self._next].popleft())
            self._taken[self._next] += 1
            self._next = (self._next + 1) % len(self._lanes)
        if len(found) < count:
            self._find_rest()
        return found

    def states(self) -> States:
        """Return the states from which a resume may continue after the samples that were taken."""
        found = []
        for lane, begun, taken in zip(self._lanes, self._begun, self._taken, strict=True):
            while len(begun) > 1 and begun[1][0] <= taken:
                begun.popleft()
            if begun and begun[0][1] is not None:
                found.append([lane.index, lane.count, *begun[0]])
        return found

    def close(self) -> None:
        """Stop the loader processes."""
        self._chunks.close()

    def _is_filled(self, lane: int) -> bool:
        while not self._waiting[lane] and not self._is_at_end[lane] and self._read():
            pass
        return bool(self._waiting[lane])

    def _read(self) -> bool:
        packed = next(self._chunks, None)
        if packed is None:
            return False
        lane, at, state, samples, is_last = pickle.loads(packed)
        self._waiting[lane].extend(samples)
        self._begun[lane].append((at, state))
        self._is_at_end[lane] = is_last
        return True

    def _find_rest(self) -> None:
        """Set `fault` if other parts have samples left although the part of the next sample has ended."""
        while not all(self._is_at_end) and not any(self._waiting) and self._read():
            pass
        if any(self._waiting):
            counts = ", ".join(
                f"part {lane.index}" for lane, rest in zip(self._lanes, self._waiting, strict=True) if rest
            )
            self.fault = f"part {self._lanes[self._next].index} of {self._lanes[0].count} ended before {counts}"


class _Chunks(IterableDataset[bytes]):
    """Yield the samples of this loader process's part in pieces."""

    def __init__(self, lanes: list[Lane], size: int) -> None:
        self._lanes, self._size = lanes, size

    def __iter__(self) -> Iterator[bytes]:
        from distributed.backends._torch.streams import packed

        info = get_worker_info()
        assert info is not None
        # A data set that divides itself among loader processes must not divide its part again.
        torch.utils.data._utils.worker._worker_info = None
        lane = self._lanes[info.id]
        randomness, at = sample_rng.OwnStream(lane.seed), lane.start
        with randomness:
            part, items = lane.opened()
        is_last = False
        while not is_last:
            state = lane.state(part, randomness)
            with randomness:
                samples = list(itertools.islice(items, self._size))
            is_last = len(samples) < self._size
            yield packed((info.id, at, state, samples, is_last))
            at += len(samples)


def _unchanged(chunk: Any) -> Any:
    return chunk
