"""Where events of a run go: to the launcher's display, or to one in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.launcher import link
from distributed.state import WorkerContext


class Reporter:
    """Sends events to the launcher's display, or shows them here. Of the main process only."""

    def __init__(self, context: WorkerContext, verbose: bool) -> None:
        self._context, self.verbose = context, verbose
        self._display: Any = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        if not self._context.is_main_process:
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

            self._display = Display(verbose=self.verbose)
        self._display.handle(content)
        if content["kind"] == "finished":
            self._display.close()
            self._display = None
