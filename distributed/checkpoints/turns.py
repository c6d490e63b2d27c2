"""Let ranks wait for a busy rank outside of collectives. Collectives have a timeout, and a disk may take longer than that."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from distributed.errors import TrainingError
from distributed.state import WorkerContext

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.05
_ALONE_S = 1.0  # time in which a store that works has told the others that this rank does not wait
_READ_S = 30.0  # the longest time for which the main process waits until the others have read that a block is over
_GROWTH = 1.1  # of the pause, which therefore stays at about a tenth of the wait


class Turn:
    """One block of work.

    Attributes:
        said: what this rank says at the end of its work, JSON-able, or None.
        heard: rank -> what it said, without the ranks that said nothing. Set after the block, the same on all ranks. If only the main
            process works in the block, it alone is heard.
    """

    def __init__(self) -> None:
        self.said: Any = None
        self.heard: dict[int, Any] = {}


class Turns:
    """Blocks of work that all ranks enter and leave together, however long the work takes.

    A working rank counts heartbeats in `store`, which all ranks share (see `World.key_value_store`). Ranks that wait
    for a working rank give up when it has sent no heartbeat for `timeout_s` seconds, because its process or its machine
    hangs. The main process, which may host the store, leaves a block when the other ranks have read that it is over, or after 30
    seconds: it is no error if a rank enters the block later.

    Args:
        store: the store.
        context: the rank of this process.
        name: prefix of the keys in the store that only these turns use.
        timeout_s: seconds.
        describe: returns what a rank says if an error ends its turn, JSON-able.
    """

    def __init__(
        self,
        store: Any,
        context: WorkerContext,
        *,
        name: str,
        timeout_s: float,
        describe: Callable[[BaseException], Any],
    ) -> None:
        self._store, self._context, self._name, self._timeout_s = store, context, name, timeout_s
        self._describe = describe
        self._num_over = 0
        self._was_alone = False  # whether this rank has not waited for the others at the end of the last turn

    @contextlib.contextmanager
    def turn(self, *, everybody: bool) -> Iterator[Turn]:
        """Enter a block in which every rank works (`everybody`), or only the main process. Every rank must enter it.

        If the block raises an error, this rank does not wait for the others. If it works in the block, they hear what it has
        said by then, or else the description of the error. Raises TrainingError on the waiting ranks if the rank that they wait for sends
        no heartbeat.
        """
        turn = Turn()
        signals = _Signals(self._store, self._context, self._name, self._num_over, self._timeout_s, turn)
        try:
            signals.start(everybody=everybody, after_alone=self._was_alone)
            self._was_alone = False
            yield turn
            signals.end()
        except BaseException as error:
            self._was_alone = True
            signals.end_alone(self._describe(error))
            raise
        finally:
            self._num_over += 1


class _Signals:
    """The signals of this rank and of those that it waits for, in one turn. A thread uses the store, because a call to a hung store
    never returns."""

    def __init__(
        self, store: Any, context: WorkerContext, name: str, num_over: int, timeout_s: float, turn: Turn
    ) -> None:
        self._store, self._context, self._name, self._turn = store, context, name, turn
        self._num_over, self._timeout_s = num_over, timeout_s
        self._is_done, self._is_alone = threading.Event(), threading.Event()
        # The number of a rank for each of its heartbeats, and None when the turn is over.
        self._seen: queue.SimpleQueue[int | Exception | None] = queue.SimpleQueue()
        self._num_beats, self._last_beat = 0, time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self, *, everybody: bool, after_alone: bool) -> None:
        """Start the thread. It sends heartbeats if this rank works, until `end`, and waits for other ranks then.

        If this rank has ended the last turn alone (`after_alone`), the thread first waits until the main process has heard it.
        """
        args = (everybody, after_alone)
        self._thread = threading.Thread(target=self._run, args=args, name="distributed-turn", daemon=True)
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

    def end_alone(self, said: Any) -> None:
        """End the turn of this rank without waiting for the others, which hear `said` if this rank has said nothing."""
        if self._turn.said is None:
            self._turn.said = said
        self._is_alone.set()
        self._is_done.set()
        if self._thread is not None:
            self._thread.join(_ALONE_S)

    # ------------------------------------------------------------------ the thread

    def _run(self, everybody: bool, after_alone: bool) -> None:
        end: Exception | None = None
        try:
            self._take_part(everybody, after_alone)
        except Exception as error:  # top frame of a thread: `end` raises it, for example if the store's host has ended
            end = error
        if not self._context.is_main_process:
            with contextlib.suppress(RuntimeError):  # the store's host has ended
                self._store.set(self._key(f"{self._context.rank}/read"), str(self._num_over + 1))
        self._seen.put(end)

    def _take_part(self, everybody: bool, after_alone: bool) -> None:
        is_main = self._context.is_main_process
        if after_alone and not is_main:
            self._heard_in(self._num_over - 1)
        while (is_main or everybody) and not self._is_done.wait(self._timeout_s / 4):
            self._beat()
        if is_main:
            said = self._gathered() if everybody else {0: self._turn.said}
            self._turn.heard = {rank: each for rank, each in said.items() if each is not None}
            self._store.set(self._key(f"0/{self._num_over}"), json.dumps(self._turn.heard))
            self._wait_until_read()
            return
        if everybody:
            self._store.set(self._key(self._context.rank), f"{self._num_over + 1} 0 {json.dumps(self._turn.said)}")
        self._turn.heard = self._heard_in(self._num_over)

    def _gathered(self) -> dict[int, Any]:
        """Return what all ranks say at the end of their work, or what this rank says, if it ends its turn alone."""
        said = {}
        with contextlib.suppress(_AloneError):
            # other ranks wait for the main process, which therefore waits for all
            said = {rank: self._said_by(rank) for rank in range(1, self._context.world_size)}
        return {0: self._turn.said, **said}

    def _heard_in(self, num_over: int) -> dict[int, Any]:
        """Wait until the main process ends the turn `num_over`, and return what it has heard. Each turn has a key of its own, because
        the main process may be some turns ahead (see `_wait_until_read`)."""
        found = self._wait_for(0, lambda: self._look(f"0/{num_over}"))
        return {int(rank): said for rank, said in json.loads(found).items()}

    def _said_by(self, rank: int) -> Any:
        """Wait until this turn is over for `rank`, and return what it has said."""

        def look() -> str:
            found = self._look(rank)
            return found if found and int(found.split(" ", 1)[0]) > self._num_over else ""

        return json.loads(self._wait_for(rank, look).split(" ", 2)[2])

    def _beat(self) -> None:
        self._num_beats, self._last_beat = self._num_beats + 1, time.monotonic()
        self._store.set(self._key(self._context.rank), f"{self._num_over} {self._num_beats} null")

    def _wait_for(self, rank: int, look: Callable[[], str]) -> str:
        """Wait until `look` returns something, and count the heartbeats of `rank`. Raises _AloneError if this rank ends its turn alone."""
        before, pause_s, next_s = "", _FIRST_PAUSE_S, time.monotonic() + self._timeout_s / 8
        self._seen.put(rank)
        while not (found := look()):
            if time.monotonic() > next_s:
                if (beat := self._look(rank)) != before:
                    self._seen.put(rank)
                before, next_s = beat, time.monotonic() + self._timeout_s / 8
            if self._is_alone.wait(pause_s):
                raise _AloneError
            if self._context.is_main_process and time.monotonic() > self._last_beat + self._timeout_s / 4:
                self._beat()
            pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)
        return found

    def _wait_until_read(self) -> None:
        """Wait until every other rank has read that this turn is over, or has ended it alone. This rank sends no heartbeats meanwhile."""
        keys = [self._key(f"{rank}/read") for rank in range(1, self._context.world_size)]
        until, pause_s = time.monotonic() + min(_READ_S, self._timeout_s / 4), _FIRST_PAUSE_S
        while keys and not (self._store.check(keys) and min(map(int, self._store.multi_get(keys))) > self._num_over):
            if self._is_alone.wait(pause_s) or time.monotonic() > until:
                return
            pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)

    def _look(self, what: int | str) -> str:
        key = self._key(what)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _key(self, what: int | str) -> str:
        return f"{self._name}/{what}"


class _AloneError(Exception):
    """This rank does not wait for the others."""
