"""Show the progress of a run in a notebook's cell: one output that is replaced as training goes on."""

from __future__ import annotations

import contextlib
import html
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from distributed.loggers.wording import bar_line, progress_parts

_WIDTH = 100  # columns of the text that front ends without HTML show
_GAP = " &nbsp; "


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class CellOutput:
    """A separate output of a notebook's cell that can be replaced. Use it only in the thread that runs the cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def put(self, forms: dict[str, str]) -> None:
        """Replace what the output shows by `forms`, a text for each MIME type."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)

    def stop(self) -> None:
        """Empty the output. The next `put` creates a new output."""
        if self._handle is not None:
            self.put({"text/plain": "", "text/html": ""})
        self._handle = None


class CellBar(CellOutput):
    """The progress bar of a fit in a cell."""

    def show(self, event: Mapping[str, Any]) -> None:
        self.put({"text/plain": bar_line(event, _WIDTH), "text/html": bar_html(event)})

    def take(self, message: Mapping[str, Any] | None) -> None:
        """Show a message that a `SentBar` has sent. None removes the bar."""
        if message is None:
            self.stop()
        else:
            self.show(message)


class SentBar:
    """The bar of a launcher whose caller shows the bar: it writes a JSON line to `fd` for each event, and null at the end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def show(self, event: Mapping[str, Any]) -> None:
        self._send(event)

    def stop(self) -> None:
        self._send(None)

    def _send(self, message: Mapping[str, Any] | None) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(message).encode() + b"\n")


def bar_html(event: Mapping[str, Any]) -> str:
    """Return the HTML of the browser's own progress bar and the text of `event` beside it."""
    step, total = event.get("step"), event.get("total_steps")
    bar = f'<progress value="{step}" max="{total}"></progress>{_GAP}' if step is not None and total else ""
    return f"<div>{bar}{_GAP.join(html.escape(part) for part in progress_parts(event))}</div>"
