"""How any rank makes all ranks do something at the same step: stop after a signal, save because time is up.

It costs the training thread two attribute reads a step and no collective. A watcher thread looks into the ranks' shared
store a few times a second; when a request is there it holds its rank at the next boundary, all ranks publish how many units
they have entered, and the largest of these numbers is where everybody acts: no rank is past it, and every rank can reach it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

STOP = "stop: "  # before the reason, in the request that `stop` makes


class CommonStep:
    """One per rank and fit. `tick()` is called by the training thread before each unit (update, evaluation batch).

    `store` is shared by the ranks, with `set`, `get`, `check` and `compare_set` as torch.distributed's Store has them.
    """

    def __init__(
        self, rank: int, world_size: int, store: Any, name: str, *, poll_s: float = 0.2, timeout_s: float = 300.0
    ) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._name, self._poll_s, self._timeout_s = name, poll_s, timeout_s
        self.reasons: list[str] = []  # for which this rank asked to stop
        self._entered = 0
        self._is_armed = False
        self._requests: list[str] = []
        self._generation = 0
        self._target: int | None = None
        self._action = ""
        self._known = threading.Event()
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        if world_size > 1:
            self._watcher = threading.Thread(target=self._watch, name="distributed-common-step", daemon=True)
            self._watcher.start()

    def request(self, action: str) -> None:
        """Ask all ranks to do `action` at a common boundary. Any rank, any thread, also from a signal handler."""
        self._requests.append(action)
        if self._watcher is None:
            self._is_armed = True

    def stop(self, reason: str) -> None:
        """Ask all ranks to end training for `reason`. Any rank, any thread."""
        self.reasons.append(reason)
        if len(self.reasons) == 1:
            self.request(f"{STOP}{reason}")

    def tick(self) -> str | None:
        """Enter the next unit, or get the action that all ranks do now instead of it; then call again. All ranks alike."""
        self._entered += 1
        if not self._is_armed:
            return None
        return self._settle()

    def close(self) -> None:
        """End the watcher. Every rank, when no more ticks come."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(5 * self._poll_s)  # not for ever: a store whose host hangs never answers

    def _settle(self) -> str | None:
        if self._watcher is None:
            return self._settle_alone()
        if not self._known.wait(self._timeout_s) or self._target is None:
            raise TimeoutError(
                f"the other ranks did not agree on {self._action or 'a request'} within {self._timeout_s:g} s"
            )
        if self._entered <= self._target:
            return None
        self._entered -= 1
        action = self._action
        self._generation += 1
        self._known.clear()
        self._target = None
        self._is_armed = False  # last: the watcher looks again from here on
        return action

    def _settle_alone(self) -> str | None:
        self._is_armed = False  # first: a signal handler or the clock that asks from here on arms it again
        if not self._requests:
            return None
        self._entered -= 1
        action = self._requests.pop(0)
        if self._requests:
            self._is_armed = True
        return action

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                if not self._is_armed:
                    self._look()
            except RuntimeError:  # the store's host is gone: the launcher ends this rank, or a collective fails
                self._known.set()
                return

    def _look(self) -> None:
        key = f"{self._name}/{self._generation}"
        if self._requests and not self._store.check([key]):
            self._store.compare_set(key, "", self._requests[0])
        if not self._store.check([key]):
            return
        action = self._store.get(key).decode()
        if self._requests and self._requests[0] == action:
            self._requests.pop(0)
        self._action = action
        self._is_armed = True  # before the count is read: the training thread enters first and looks afterwards
        self._store.set(f"{key}/{self._rank}", str(self._entered))
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if self._ended.wait(0.005) or time.monotonic() > deadline:
                self._known.set()
                return
        self._target = max(int(self._store.get(k)) for k in keys)
        self._known.set()
