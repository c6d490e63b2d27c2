"""Report events of a run to the launcher's display, or to a display in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
        content = dict(event)
        if "text" not in content and "message" in content:
            content["text"] = content["message"]
        channel = link()
        if channel is not None:
            channel.send(content)
            return
        if self._display is None:
            from distributed.loggers.console import Display

            self._display = Display(verbose=self._verbose)
        self._display.handle(content)
        self.on_event(content)

    def set_verbose(self, verbose: bool) -> None:
        """Show everything from now on, or only warnings and errors.

        The script may differ from the command line in this.
        """
        self._verbose = verbose
        if link() is not None or self._display is not None:
            self({"kind": "verbose", "value": verbose})

    def close(self) -> None:
        """Release the terminal, at the end of a fit and after an error."""
        if self._display is not None:
            self._display.close()
            self._display = None
