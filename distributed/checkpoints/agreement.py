"""Ranks that fail together: an error on one is known to all before anybody waits for the dead."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from distributed.checkpoints.turns import Turns
from distributed.errors import CheckpointError, ConfigError, DistributedError, TrainingError
from distributed.state import WorkerContext

T = TypeVar("T")
Key = TypeVar("Key")


class Ranks(Protocol):
    """What agreement needs of the processes that train together: a part of `distributed.backends.world.World`."""

    context: WorkerContext

    def reduce(self, sums: Mapping[Key, float], /) -> dict[Key, float]:
        """Return the sums over all ranks. A collective."""

    def broadcast(self, value: Any, /, src: int = 0) -> Any:
        """Return rank `src`'s JSON-able `value` on every rank. A collective."""

    def key_value_store(self) -> Any:
        """Return a store shared by all ranks with `set`, `get`, `check` and `compare_set`, or None in a world of one."""


# What a failure is on the ranks that only hear of it.
_KINDS: dict[str, type[OSError | DistributedError]] = {
    "disk": OSError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
    "training": TrainingError,
}


class Agreement:
    """Runs actions whose disk and user errors arise on every rank alike; other exceptions are not its business.

    An action may take longer than `timeout_s`, as long as its process lives.
    """

    def __init__(self, world: Ranks, timeout_s: float) -> None:
        self.world, self.context, self._timeout_s = world, world.context, timeout_s
        self._turns: Turns | None = None

    def on_main(self, action: Callable[[], T]) -> T:
        """The JSON-able result of `action` on the main process, on every rank. A collective, and a barrier."""
        error: OSError | DistributedError | None = None
        answer: dict[str, Any] = {}
        with self._turn(everybody=False):
            if self.context.is_main_process:
                try:
                    answer = {"value": action()}
                except (OSError, DistributedError) as raised:
                    error, answer = raised, _describe(raised)
        answer = self.world.broadcast(answer)
        if error is not None:
            raise error
        if "value" not in answer:
            raise _rebuild(answer, 0)
        value: T = answer["value"]
        return value

    def on_all(self, action: Callable[[], T]) -> T:
        """This rank's own result of `action`, which every rank runs; the first failing rank's error on the others.

        A collective. One rank's refusal (a DistributedError) goes before another's failing disk.
        """
        error: OSError | DistributedError | None = None
        with self._turn(everybody=True):
            try:
                value = action()
            except (OSError, DistributedError) as raised:
                error = raised
        refused = isinstance(error, DistributedError)
        votes = self.world.reduce({"failed": float(error is not None), "refused": float(refused)})
        if votes["failed"]:
            self._raise_together(error, is_cause=refused if votes["refused"] else error is not None)
        return value

    def _turn(self, *, everybody: bool) -> contextlib.AbstractContextManager[None]:
        store = self.world.key_value_store()
        if store is None:
            return contextlib.nullcontext()
        if self._turns is None:  # its name is new, because other agreements of this process used the store before
            name = self.world.broadcast(secrets.token_hex(4) if self.context.is_main_process else None)
            self._turns = Turns(store, self.context, name=name, timeout_s=self._timeout_s)
        return self._turns.turn(everybody=everybody)

    def _raise_together(self, error: OSError | DistributedError | None, is_cause: bool) -> None:
        """Name the lowest rank at fault to all; that costs a second collective, on failure only."""
        ranks = range(self.context.world_size)
        votes = self.world.reduce({str(rank): float(is_cause and rank == self.context.rank) for rank in ranks})
        first = next(rank for rank in ranks if votes[str(rank)])
        answer = self.world.broadcast(_describe(error) if error is not None else None, src=first)
        raise error if error is not None and is_cause else _rebuild(answer, first)


def _describe(error: OSError | DistributedError) -> dict[str, Any]:
    if isinstance(error, OSError):
        return {"kind": "disk", "errno": error.errno, "message": error.strerror or str(error)}
    kinds = (kind for kind, cls in _KINDS.items() if isinstance(error, cls))
    return {"kind": next(kinds, "training"), "message": str(error)}


def _rebuild(answer: dict[str, Any], rank: int) -> OSError | DistributedError:
    message = f"rank {rank}: {answer['message']}"
    kind = _KINDS[answer["kind"]]
    error = OSError(answer["errno"] or 0, message) if kind is OSError else kind(message)
    if isinstance(error, DistributedError):
        error.is_echo = True
    return error
