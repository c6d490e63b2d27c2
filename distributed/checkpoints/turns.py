"""Let ranks wait for a busy rank outside of collectives. Collectives have a timeout, and a disk may take longer than that."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from distributed.errors import TrainingError
from distributed.state import WorkerContext

_LONGEST_PAUSE_S = 0.05
_GROWTH = 1.1  # of the pause, which therefore stays at about a tenth of the wait


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
    def turn(self, *, everybody: bool) -> Iterator[None]:
        """Enter a block in which every rank works (`everybody`), or only the main process. Every rank must enter it.

        Raises TrainingError on the waiting ranks if the rank that they wait for sends no heartbeat.
        """
        is_main = self._context.is_main_process
        if is_main or everybody:
            with self._beating():
                yield
                if is_main and everybody:  # other ranks wait for the main process, which therefore waits for all
                    self._wait_for(range(1, self._context.world_size))
        else:
            yield
        if not is_main:
            self._wait_for([0])
        self._num_over += 1

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._beat, args=(ended,), name="distributed-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._store.set(self._key(self._context.rank), f"{self._num_over + 1} 0")

    def _beat(self, ended: threading.Event) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the store's host has ended: the launcher ends this rank, or its next collective fails
            for beat in itertools.count(1):
                if ended.wait(self._timeout_s / 4):
                    return
                self._store.set(self._key(self._context.rank), f"{self._num_over} {beat}")

    def _wait_for(self, ranks: Sequence[int]) -> None:
        """Wait until the turn of all `ranks` is over.

        A thread polls the store, because a call to a hung store never returns.
        """
        signs: queue.SimpleQueue[int | RuntimeError | None] = queue.SimpleQueue()
        given_up = threading.Event()
        args = (ranks, signs, given_up)
        threading.Thread(target=self._watch, args=args, name="distributed-watch", daemon=True).start()
        rank = 0
        try:
            while (sign := signs.get(timeout=self._timeout_s)) is not None:
                if isinstance(sign, RuntimeError):
                    raise sign
                rank = sign
        except queue.Empty:
            raise TrainingError(
                f"rank {rank} did not respond for {self._timeout_s:g} s (timeout_s): it hangs, or its machine does"
            ) from None
        finally:
            given_up.set()

    def _watch(
        self, ranks: Sequence[int], signs: queue.SimpleQueue[int | RuntimeError | None], given_up: threading.Event
    ) -> None:
        """Put a rank's number into `signs` for each of the rank's heartbeats, and None when the turns of all ranks are
        over."""
        try:
            for rank in ranks:
                seen, pause_s = None, 0.001
                while not self._is_over(found := self._look(rank)):
                    if found != seen:
                        signs.put(rank)
                    seen = found
                    if given_up.wait(pause_s):
                        return
                    pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)
            signs.put(None)
        except RuntimeError as error:  # the store's host has ended
            signs.put(error)

    def _look(self, rank: int) -> str:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _is_over(self, found: str) -> bool:
        return bool(found) and int(found.split()[0]) > self._num_over

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"
