"""Let ranks wait for a busy rank outside of collectives. Collectives have a timeout, and a disk may take longer than that."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from distributed.errors import DistributedError, TrainingError
from distributed.state import WorkerContext

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.05
_ALONE_S = 1.0  # time in which a store that works has told the others that this rank does not wait
_GROWTH = 1.1  # of the pause, which therefore stays at about a tenth of the wait


class Turn:
    """One block of work.

    Attributes:
        said: what this rank says at the end of its work, JSON-able, or None.
        heard: rank -> what it said, without the ranks that said nothing. Complete after the block, if every rank works in it.
    """

    def __init__(self) -> None:
        self.said: Any = None
        self.heard: dict[int, Any] = {}


class Turns:
    """Blocks of work that all ranks enter and leave together, however long the work takes.

    A working rank counts heartbeats in `store`, which all ranks share (see `World.key_value_store`). Ranks that wait
    for a working rank give up when it has sent no heartbeat for `timeout_s` seconds, because its process or its machine
    hangs.
    """

    def __init__(self, store: Any, context: WorkerContext, *, name: str, timeout_s: float) -> None:
        self._store, self._context, self._name, self._timeout_s = store, context, name, timeout_s
        self._num_over = 0

    @contextlib.contextmanager
    def turn(self, *, everybody: bool) -> Iterator[Turn]:
        """Enter a block in which every rank works (`everybody`), or only the main process. Every rank must enter it.

        A rank whose block raises an error does not wait for the others, which hear what it said before the error. Raises TrainingError
        on the waiting ranks if the rank that they wait for sends no heartbeat.
        """
        turn, signals = Turn(), _Signals(self._store, self._context, self._name, self._num_over, self._timeout_s)
        signals.start(turn, everybody=everybody)
        try:
            yield turn
        except BaseException:
            signals.end_alone()
            raise
        signals.end()
        self._num_over += 1


class _Signals:
    """The signals of this rank and of those that it waits for, in one turn. A thread uses the store, because a call to a hung store
    never returns."""

    def __init__(self, store: Any, context: WorkerContext, name: str, num_over: int, timeout_s: float) -> None:
        self._store, self._context, self._name = store, context, name
        self._num_over, self._timeout_s = num_over, timeout_s
        self._is_done, self._is_given_up = threading.Event(), threading.Event()
        # The number of a rank for each of its heartbeats, and None when the turn is over.
        self._seen: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._num_beats, self._last_beat = 0, time.monotonic()

    def start(self, turn: Turn, *, everybody: bool) -> None:
        """Send heartbeats if this rank works, until `end`."""
        self._thread = threading.Thread(target=self._run, args=(turn, everybody), name="distributed-turn", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the turn is over. Raises TrainingError if a rank that this one waits for sends no heartbeat."""
        self._is_done.set()
        rank = 0
        try:
            while (seen := self._seen.get(timeout=self._timeout_s)) is not None:
                if isinstance(seen, Exception):
                    raise seen
                rank = seen
        except queue.Empty:
            raise TrainingError(
                f"rank {rank} did not respond for {self._timeout_s:g} s (timeout_s): it hangs, or its machine does"
            ) from None
        finally:
            self._is_given_up.set()

    def end_alone(self) -> None:
        """End the turn of this rank without waiting for the others, because its block raised an error."""
        self._is_given_up.set()
        self._is_done.set()
        self._thread.join(_ALONE_S)

    # ------------------------------------------------------------------ the thread

    def _run(self, turn: Turn, everybody: bool) -> None:
        is_main = self._context.is_main_process
        works = is_main or everybody
        try:
            while works and not self._is_done.wait(self._timeout_s / 4):
                self._beat()
            if everybody and is_main:
                # other ranks wait for the main process, which therefore waits for all
                others = range(0) if self._is_given_up.is_set() else range(1, self._context.world_size)
                said = {0: turn.said, **{rank: self._wait_for(rank) for rank in others}}
                turn.heard = {rank: each for rank, each in said.items() if each is not None}
                self._store.set(self._key("heard"), json.dumps(turn.heard))
            if works:
                self._store.set(self._key(self._context.rank), f"{self._num_over + 1} 0 {json.dumps(turn.said)}")
            if not is_main:
                self._wait_for(0)
            if everybody and not is_main:
                # No later turn has replaced it, because the main process would wait there for this rank.
                heard = json.loads(self._store.get(self._key("heard")))
                turn.heard = {int(rank): each for rank, each in heard.items()}
            self._seen.put(None)
        except (RuntimeError, DistributedError) as error:  # the store's host has ended, or another program writes to it
            self._seen.put(error)

    def _beat(self) -> None:
        self._num_beats, self._last_beat = self._num_beats + 1, time.monotonic()
        self._store.set(self._key(self._context.rank), f"{self._num_over} {self._num_beats} null")

    def _wait_for(self, rank: int) -> Any:
        """Wait until the work of `rank` is over, and return what it said."""
        before, pause_s = "", _FIRST_PAUSE_S
        self._seen.put(rank)
        while not self._is_over(found := self._look(rank)):
            if found != before:
                self._seen.put(rank)
            before = found
            if self._is_given_up.wait(pause_s):
                raise RuntimeError("given up")
            if self._context.is_main_process and time.monotonic() > self._last_beat + self._timeout_s / 4:
                self._beat()
            pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)
        return json.loads(found.split(" ", 2)[2])

    def _look(self, rank: int) -> str:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _is_over(self, found: str) -> bool:
        return bool(found) and int(found.split(" ", 1)[0]) > self._num_over

    def _key(self, what: int | str) -> str:
        return f"{self._name}/{what}"
