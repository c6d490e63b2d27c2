"""Make all ranks act at a common step after a signal, or when the clock asks for a save or a validation."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from distributed.runs.processes import REGROUP_SIGNAL, heeded_signals, raise_kept
from distributed.state import WorkerContext
from distributed.training.common_step import CommonStep


@contextlib.contextmanager
def stop_on_signals(
    common: CommonStep, in_worker: bool, *, is_elastic: bool = False, may_leave: bool = False
) -> Iterator[None]:
    """Make SIGTERM, SIGINT, SIGUSR1 and SIGHUP stop all ranks at the same step, and REGROUP_SIGNAL too if `is_elastic`.

    With `may_leave`, SIGTERM ends only the node of this process: the run goes on without it, as after REGROUP_SIGNAL.

    Outside of the main thread this does nothing, and the signals keep their handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def stop(signum: int, frame: Any) -> None:
        if seen and not in_worker and signum == signal.SIGINT:
            raise KeyboardInterrupt  # the user pressed Ctrl-C twice in a process that no launcher started
        if not seen:
            asked = REGROUP_SIGNAL if may_leave and signum == signal.SIGTERM else signum
            common.request(f"signal {int(asked)}")
        seen.append(signum)

    raise_kept()
    numbers = (*heeded_signals(), *((REGROUP_SIGNAL,) if is_elastic else ()))
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def by_the_clock(
    common: CommonStep, action: str, every_s: float | None, context: WorkerContext, done: threading.Event
) -> Iterator[None]:
    """Ask for `action` `every_s` seconds after the start and after each time that `done` is set.

    Only the clock of the main process is used. The time that the action takes does not count, because actions that take longer
    than `every_s` would leave no time for training.
    """
    if every_s is None or not context.is_main_process:
        yield
        return
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(every_s):
            done.clear()
            common.request(action)
            while not done.wait(0.2) and not ended.is_set():
                continue

    thread = threading.Thread(target=ask, name=f"distributed-{action}-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        done.set()
        thread.join()
