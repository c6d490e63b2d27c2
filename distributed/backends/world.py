"""Communicate between the processes of a run, with one protocol for every engine."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, TypeVar

from distributed.state import WorkerContext

Key = TypeVar("Key")


class World(abc.ABC):
    """Communicate with the other processes of a run.

    `reduce`, `broadcast`, `gather` and `barrier` are collectives: every rank calls them, in the same order.
    """

    context: WorkerContext  # rank, world size and device of this process

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.context.world_size

    @abc.abstractmethod
    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        """Return each value summed over all ranks, in float64. Every rank passes the same keys in the same order."""

    @abc.abstractmethod
    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return the `value` of rank `src` on every rank. `distributed.backends.wire` says which values can be sent."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in the order of ranks. The same values as in `broadcast` can be sent."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have called it."""

    @abc.abstractmethod
    def key_value_store(self) -> Any:
        """Return a store that all ranks share, with `set`, `get`, `check` and `compare_set`, or None in a world of one.

        Not a collective.
        """


class OneProcess(World):
    """Communicate in a world of one process, which needs no engine."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def reduce(self, sums: Mapping[Key, float]) -> dict[Key, float]:
        return dict(sums)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return None

    def key_value_store(self) -> Any:
        return None
