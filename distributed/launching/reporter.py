"""Where events of a run go: to the launcher's display, or to one in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distributed.launching.request import link


class Reporter:
    """Sends events to the launcher's display, or shows them here. Of the main process only."""

    def __init__(self, is_main_process: bool, verbose: bool) -> None:
        self._is_main_process, self._verbose = is_main_process, verbose
        self._display: Any = None
        self.on_event: Callable[[Mapping[str, Any]], None] = lambda event: None  # gets what is shown here

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
        """Show all from now on, or only warnings and errors: the script may say otherwise than the command line."""
        self._verbose = verbose
        if link() is not None or self._display is not None:
            self({"kind": "verbose", "value": verbose})

    def close(self) -> None:
        """Give the terminal back, at the end of a fit and after an error."""
        if self._display is not None:
            self._display.close()
            self._display = None
