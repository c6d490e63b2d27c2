"""Make all ranks act at a common step after a signal, or when the clock of time-based checkpoints asks for a save."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from distributed.runs.processes import heeded_signals, raise_kept
from distributed.state import WorkerContext
from distributed.training.common_step import CommonStep


@contextlib.contextmanager
def stop_on_signals(common: CommonStep, in_worker: bool) -> Iterator[None]:
    """Make SIGTERM, SIGINT, SIGUSR1 and SIGHUP stop all ranks at the same step.

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
            common.request(f"signal {signum}")
        seen.append(signum)

    raise_kept()
    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def save_by_the_clock(
    common: CommonStep, every_s: float | None, context: WorkerContext, saved: threading.Event
) -> Iterator[None]:
    """Ask for a save `every_s` seconds after the start and after each time that `saved` is set.

    The clock of the main process counts for all ranks. The time that a save takes is not counted, because saves that take longer
    than `every_s` would leave no time for training.
    """
    if every_s is None or not context.is_main_process:
        yield
        return
    ended = threading.Event()

    def ask() -> None:
        while not ended.wait(every_s):
            saved.clear()
            common.request("save")
            while not saved.wait(0.2) and not ended.is_set():
                continue

    thread = threading.Thread(target=ask, name="distributed-checkpoint-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        saved.set()
        thread.join()
