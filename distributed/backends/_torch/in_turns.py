"""Suspend a function at each call of `update`, so that the micro-batches of an update batch can take turns."""

from __future__ import annotations

import contextvars
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Call = tuple[str, Any]  # the arguments of a call of `update`


class _Abandoned(BaseException):
    """Unwinds the stack of a function that is not continued."""


class Suspended:
    """Run `function` in a thread up to its next call of `update`, each time that `advance` is called.

    The function and its caller never run at the same time. A generator would need no thread, but then a training_step
    would have to be written with `yield`.
    """

    def __init__(self, pool: ThreadPoolExecutor, function: Callable[[Callable[[str, Any], None]], Any]) -> None:
        self._pool, self._function = pool, function
        self._go: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._future: Future[Any] | None = None
        self._is_abandoned = False

    def advance(self) -> Call | None:
        """Run the function up to its next call of `update` and return the arguments of that call, or None at its end.

        Raises what the function raises.
        """
        if self._future is None:
            self._future = self._pool.submit(contextvars.copy_context().run, self._function, self._update)
            self._future.add_done_callback(lambda future: self._came.put(None))
        else:
            self._go.put(True)
        call = self._came.get()
        if call is None:
            self._future.result()
        return call

    def result(self) -> Any:
        """Return the result of the function."""
        assert self._future is not None
        return self._future.result()

    def abandon(self) -> None:
        """Let a function that is suspended end without running on."""
        self._is_abandoned = True
        self._go.put(False)

    def _update(self, name: str, value: Any) -> None:
        if self._is_abandoned:  # called while its stack unwinds
            raise _Abandoned
        self._came.put((name, value))
        del value
        if not self._go.get():
            raise _Abandoned
