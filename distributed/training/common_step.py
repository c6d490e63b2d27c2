"""Let any rank make all ranks act at the same step, for example to stop after a signal or to save a checkpoint.

A step costs the training thread two attribute reads and no collective. On each rank, a watcher thread polls the store that the
ranks share. When the watchers of all ranks have found a request, each makes its rank wait at the next boundary and publishes the
number of units that the rank has entered. All ranks act at the largest of these numbers, because no rank is past it and every rank
can reach it. A rank waits for milliseconds only, because it begins to wait after all watchers have found the request.
"""

from __future__ import annotations

import threading
import time
from typing import Any

STOP = "stop: "  # prefix of the reason in the requests of `CommonStep.stop`
_PAUSE_S = 0.005  # seconds between two checks of the store while the ranks agree


class CommonStep:
    """Agree with the other ranks on a common step. Each rank creates one object per fit.

    The training thread calls `tick()` before each unit, which is an update or an evaluation batch. `store` is shared by the
    ranks and has the methods `set`, `get`, `check` and `compare_set` of `torch.distributed.Store`.
    """

    def __init__(
        self, rank: int, world_size: int, store: Any, name: str, *, poll_s: float = 0.2, timeout_s: float = 300.0
    ) -> None:
        self._rank, self._world_size, self._store = rank, world_size, store
        self._name, self._poll_s, self._timeout_s = name, poll_s, timeout_s
        self.reasons: list[str] = []  # reasons for which this rank asked to stop
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
        """Ask all ranks to do `action` at a common boundary. Any thread of any rank may call it, also a signal handler."""
        self._requests.append(action)
        if self._watcher is None:
            self._is_armed = True

    def stop(self, reason: str) -> None:
        """Ask all ranks to end training for `reason`. Any thread of any rank may call it."""
        self.reasons.append(reason)
        if len(self.reasons) == 1:
            self.request(f"{STOP}{reason}")

    def tick(self) -> str | None:
        """Enter the next unit and return None, or return the action that all ranks do now instead of the next unit.

        After an action, call `tick()` again. Every rank gets the same actions at the same units.
        """
        self._entered += 1
        if not self._is_armed:
            return None
        return self._settle()

    def close(self) -> None:
        """Stop the watcher thread. Every rank calls it after its last `tick()`."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(5 * self._poll_s)  # with a limit, because a store whose host hangs never answers

    def _settle(self) -> str | None:
        """Return None before the unit at which all ranks act, and the action when this rank has reached that unit."""
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
        self._is_armed = False  # set last, because the watcher polls again from here on
        return action

    def _settle_alone(self) -> str | None:
        self._is_armed = False  # set first, because a signal handler or the clock may arm it again from here on
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
            except RuntimeError:  # the store's host is gone, so the launcher ends this rank or a collective fails
                self._known.set()
                return

    def _look(self) -> None:
        """Publish a request of this rank. If there is a request of any rank, make this rank wait and set the unit to act at."""
        key = f"{self._name}/{self._generation}"
        if self._requests and not self._store.check([key]):
            self._store.compare_set(key, "", self._requests[0])
        if not self._store.check([key]):
            return
        action = self._store.get(key).decode()
        if self._requests and self._requests[0] == action:
            self._requests.pop(0)
        self._action = action
        is_seen = self._largest(f"{key}/seen", 0) is not None
        # Set `_is_armed` before reading `_entered`, because the training thread increments `_entered` and then checks `_is_armed`.
        self._is_armed = True
        if is_seen:
            self._target = self._largest(f"{key}/entered", self._entered)
        self._known.set()

    def _largest(self, key: str, number: int) -> int | None:
        """Return the largest `number` after all ranks have called this. Return None if the fit ends first or the timeout passes."""
        self._store.set(f"{key}/{self._rank}", str(number))
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        # Only rank 0 checks the keys of all ranks, which keeps the load on the store small.
        is_main = self._rank == 0
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys if is_main else [key]):
            if self._ended.wait(_PAUSE_S) or time.monotonic() > deadline:
                return None
        if is_main:
            self._store.set(key, str(max(int(self._store.get(each)) for each in keys)))
        return int(self._store.get(key))
