"""Deliver stop signals to the select loop of a launcher, and limit the time that the workers have to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from types import FrameType

from distributed.runs.processes import STOP_SIGNALS, heeded_signals

KILLING = 3  # the third Ctrl-C kills the workers


class Signals:
    """Deliver signals as bytes on a descriptor, for a select loop."""

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        for fd in (self._read, self._write):
            os.set_blocking(fd, False)
        self._old = {number: signal.signal(number, _do_nothing) for number in (*heeded_signals(), signal.SIGCHLD)}
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        # The process that started this one may have blocked the stop signals.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            # The run is over, so nothing is left to save. By default SIGUSR1 would end this process with 138, as a failure.
            is_deadly = number == signal.SIGUSR1 and handler == signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_deadly else handler)
        self._close()

    def fileno(self) -> int:
        return self._read

    def read(self) -> list[int]:
        """Return the signals since the last call, in order."""
        try:
            return list(os.read(self._read, 4096))
        except BlockingIOError:
            return []

    def unread(self, numbers: Sequence[int]) -> None:
        """Let the next call of `read` return these signals."""
        os.write(self._write, bytes(numbers))

    def restore(self) -> None:
        """Restore the handlers of a fresh interpreter, in a forked worker."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._end_here(*(number for number in self._old if number != signal.SIGINT))

    def ignore(self) -> None:
        """Ignore the stop signals, in the forked agent: the launcher handles them."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._end_here(signal.SIGCHLD)

    def _end_here(self, *defaults: signal.Signals) -> None:
        signal.set_wakeup_fd(-1)
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)
        self._close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGCHLD))

    def _close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing. The signal is read as a byte from the wake-up descriptor."""


class Stop:
    """A request to stop.

    Attributes:
        signum: the first signal; 0 if none has come yet.
        interrupts: how often Ctrl-C was pressed.
        kill_at: when the workers are to be killed, in monotonic seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.signum = 0
        self.interrupts = 0
        self.kill_at: float | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that this request stops."""
        return 128 + (signal.SIGINT if self.signum == signal.SIGINT else signal.SIGTERM)

    def add(self, number: int) -> bool:
        """Record a stop signal. Return True if it is the first one, which is to be sent to the workers."""
        if number == signal.SIGHUP:  # treated as SIGTERM: the terminal was closed
            number = signal.SIGTERM
        is_first = not self.signum
        if is_first:
            self.signum = number
            self.kill_at = time.monotonic() + self._timeout_s
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts >= KILLING:
                self.kill_at = time.monotonic()
        return is_first

    def is_due(self) -> bool:
        """Return whether the workers are to be killed now. If so, the next time is `timeout_s` later."""
        now = time.monotonic()
        if self.kill_at is None or now < self.kill_at:
            return False
        self.kill_at = now + self._timeout_s
        return True
