"""Let ranks fail together: when an action fails on one rank, every rank raises instead of waiting for it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from distributed.checkpoints.turns import Turn, Turns
from distributed.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    DistributedError,
    ResourceError,
    TrainingError,
)
from distributed.state import WorkerContext

T = TypeVar("T")
Key = TypeVar("Key")


class Ranks(Protocol):
    """The collectives that agreement needs, a part of `distributed.backends.world.World`."""

    context: WorkerContext

    def reduce(self, sums: Mapping[Key, float], /) -> dict[Key, float]:
        """Return the sums over all ranks, by key. Every rank must call it."""

    def broadcast(self, value: Any, /, src: int = 0) -> Any:
        """Return the JSON-able `value` of rank `src` on every rank. Every rank must call it."""

    def gather(self, value: Any, /) -> list[Any]:
        """Return the JSON-able `value` of every rank, in the order of ranks. Every rank must call it."""

    def key_value_store(self) -> Any:
        """Return a store that all ranks share, or None if there is only one rank.

        The store has the methods `set`, `get`, `check` and `compare_set`.
        """


# The exception that the other ranks raise, by the kind of the failure.
_KINDS: dict[str, type[OSError | DistributedError]] = {
    "disk": OSError,
    "damaged": DamagedError,
    "checkpoint": CheckpointError,
    "config": ConfigError,
    "resource": ResourceError,
    "training": TrainingError,
}


class Agreement:
    """Run actions so that their disk errors and user errors are raised on every rank.

    Only OSError and DistributedError are agreed on. A rank that raises another exception does not wait for the others, which raise
    TrainingError with its message. If the ranks share no store, they wait in the next collective instead. An action may take longer
    than `timeout_s` as long as its process is alive.
    """

    def __init__(self, world: Ranks, timeout_s: float) -> None:
        self.world, self.context, self._timeout_s = world, world.context, timeout_s
        self._turns: Turns | None = None

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the main process and return its JSON-able result on every rank.

        Every rank must call it. It is a barrier. If `action` fails, every rank raises its error.
        """
        error: OSError | DistributedError | None = None
        value: Any = None
        with self._turn(everybody=False) as turn:
            if self.context.is_main_process:
                try:
                    value = action()
                except (OSError, DistributedError) as raised:
                    error, turn.said = raised, described(raised)
        if turn.heard:
            _raise_together(error, turn.heard, self.context.rank)
        # This is also the barrier: the main process may leave the turn before a rank enters it.
        answer: T = self.world.broadcast(value)
        return answer

    def on_all(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank and return this rank's own result.

        Every rank must call it. If the action fails on any rank, every rank raises: a failing rank its own error, and another rank that
        of the first failing rank. If some ranks raise a DistributedError and others an OSError, only the first count as failing.
        """
        error: OSError | DistributedError | None = None
        with self._turn(everybody=True) as turn:
            try:
                value = action()
            except (OSError, DistributedError) as raised:
                error, turn.said = raised, described(raised)
        if heard := turn.heard:
            refusals = {rank: said for rank, said in heard.items() if said["kind"] != "disk"}
            _raise_together(error, refusals or heard, self.context.rank)
        return value

    @contextlib.contextmanager
    def first(self, is_first: bool, what: str) -> Iterator[None]:
        """Run the block on the ranks with `is_first`, and then on the other ranks. Every rank must enter it.

        If the block raises an Exception on one of the first ranks, that rank raises it. The waiting ranks then do not run the
        block. They raise TrainingError, which names the failed rank and `what`.
        """
        error: Exception | None = None
        with self._turn(everybody=True) as turn:
            if is_first:
                try:
                    yield
                except BaseException as raised:
                    turn.said = _said_of(raised, f"{what} failed with ")
                    if not isinstance(raised, Exception):  # the process is to end, and its launcher ends the others
                        raise
                    error = raised
        if turn.heard:
            _raise_together(error, turn.heard, self.context.rank)
        if not is_first:
            yield

    @contextlib.contextmanager
    def _turn(self, *, everybody: bool) -> Iterator[Turn]:
        store = self.world.key_value_store()
        if store is None:
            yield (turn := Turn())
            found = self.world.gather(turn.said) if everybody else [self.world.broadcast(turn.said)]
            turn.heard = {rank: said for rank, said in enumerate(found) if said is not None}
            return
        if self._turns is None:  # the name is random because other agreements of this process may use the same store
            name = self.world.broadcast(secrets.token_hex(4) if self.context.is_main_process else None)
            self._turns = Turns(store, self.context, name=name, timeout_s=self._timeout_s, describe=_said_of)
        with self._turns.turn(everybody=everybody) as turn:
            yield turn


def _raise_together(error: Exception | None, failed: Mapping[int, dict[str, Any]], rank: int) -> None:
    """Raise an error on every rank: its own one if `rank` is among those that `failed`, else that of the lowest of them."""
    if error is not None and rank in failed:
        raise error
    first = min(failed)
    raise rebuilt(failed[first], first)


def _said_of(error: BaseException, before: str = "") -> dict[str, Any]:
    """Return what a rank says about an error that is not agreed on: its description for `rebuilt`."""
    return {"kind": "training", "message": f"{before}{type(error).__name__}: {error}".removesuffix(": ")}


def described(error: OSError | DistributedError) -> dict[str, Any]:
    """Return an error as JSON, for `rebuilt` on another rank."""
    if isinstance(error, OSError):
        return {"kind": "disk", "errno": error.errno, "message": str(error.strerror or error)}
    kinds = (kind for kind, cls in _KINDS.items() if isinstance(error, cls))
    return {"kind": next(kinds, "training"), "message": str(error)}


def rebuilt(answer: dict[str, Any], rank: int) -> OSError | DistributedError:
    """Return the error that `described` described on `rank`."""
    message = f"rank {rank}: {answer['message']}"
    kind = _KINDS[answer["kind"]]
    error = OSError(answer["errno"] or 0, message) if kind is OSError else kind(message)
    if isinstance(error, DistributedError):
        error.is_echo = True
    return error
