"""Report events of a run to the launcher's display, or to a display in this process, and failures to the launcher."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from distributed.config.registry import hint_of, may_abort
from distributed.errors import DistributedError, TrainingError
from distributed.launching.causes import full_traceback, location_of, message_of, short_traceback
from distributed.launching.heartbeat import heartbeat, phase_of
from distributed.launching.request import link
from distributed.state import OnEvent


class Reporter:
    """Send events to the launcher's display, or show them in this process. Only the main process reports."""

    def __init__(self, is_main_process: bool, verbose: bool) -> None:
        self._is_main_process, self._verbose = is_main_process, verbose
        self._display: Any = None
        # Called with each event that is shown in this process.
        self.on_event: OnEvent = lambda event: None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if not self._is_main_process:
            return
        channel = link()
        if channel is not None:
            channel.send(dict(event))
            return
        if self._display is None:
            from distributed.loggers.console import Display

            self._display = Display(verbose=self._verbose)
        self._display.handle(event)
        self.on_event(event)

    def set_verbose(self, verbose: bool) -> None:
        """Set whether everything is shown from now on, or only warnings and errors.

        The script may choose another value than the command line.
        """
        self._verbose = verbose
        if link() is not None or self._display is not None:
            self({"kind": "verbose", "value": verbose})

    def close(self) -> None:
        """Release the terminal, at the end of a fit and after an error."""
        if self._display is not None:
            self._display.close()
            self._display = None


def failure_event(error: BaseException) -> dict[str, Any]:
    """Return the event with which a worker tells its launcher that `error` ends it."""
    began = time.time()
    is_ours = isinstance(error, DistributedError)
    code = error.exit_code if isinstance(error, DistributedError) else 1
    hint = hint_of(message_of(error))
    is_shown = hint is None or f"hint: {hint}" in getattr(error, "__notes__", ())
    more = "" if is_shown else f"\nhint: {hint}"
    return {
        "kind": "error", "type": type(error).__name__, "message": message_of(error), "exit_code": code, "time": began,
        "is_message_enough": is_ours, "is_echo": isinstance(error, DistributedError) and error.is_echo,
        "traceback": short_traceback(error) + more, "full_traceback": full_traceback(error) + more,
        "reached": [(at := heartbeat().progress).fit, at.step], "phase": phase_of(error).in_fit, "location": location_of(error),
        "micro_batch": error.micro_batch if isinstance(error, TrainingError) else 0,
    }  # fmt: skip


def report_before_abort(error: BaseException, rank: int) -> None:
    """Report `error` to the launcher now if a library may abort this process before the error is reported as usual."""
    channel = link()
    if channel is not None and may_abort(message_of(error)):
        phase = heartbeat().progress.phase.in_fit  # the error has not left the fit yet
        channel.send({**failure_event(error), "kind": "raises", "rank": rank, "phase": phase})
