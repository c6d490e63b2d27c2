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

_WIDTH = 100  # columns of the text for front ends without HTML
_GAP = " &nbsp; "


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class CellOutput:
    """An output of its own in a cell, which can be replaced. Used in the thread that runs the cell."""

    def __init__(self) -> None:
        self._handle: Any = None

    def put(self, forms: dict[str, str]) -> None:
        """Show `forms`, by MIME type, in the place of what was there."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display(forms, raw=True, display_id=True)
        else:
            self._handle.update(forms, raw=True)

    def stop(self) -> None:
        """Show nothing. What is put next becomes another output."""
        if self._handle is not None:
            self.put({"text/plain": "", "text/html": ""})
        self._handle = None


class CellBar(CellOutput):
    """The progress bar of a fit in a cell."""

    def show(self, event: Mapping[str, Any]) -> None:
        self.put({"text/plain": bar_line(event, _WIDTH), "text/html": bar_html(event)})

    def take(self, message: Mapping[str, Any] | None) -> None:
        """Show what a `SentBar` wrote."""
        if message is None:
            self.stop()
        else:
            self.show(message)


class SentBar:
    """The bar of a launcher whose caller shows it: write a JSON line to `fd` for each event, and null at the end."""

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
    """Return the browser's own progress bar, and beside it what the event knows."""
    step, total = event.get("step"), event.get("total_steps")
    bar = f'<progress value="{step}" max="{total}"></progress>{_GAP}' if step is not None and total else ""
    return f"<div>{bar}{_GAP.join(html.escape(part) for part in progress_parts(event))}</div>"
