"""The display of a run: a progress bar in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from distributed.errors import shown
from distributed.loggers.notebook import CellBar, in_notebook
from distributed.loggers.wording import GAP, bar_line, epoch_line, progress_parts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_PLAIN = str.maketrans("━─", "#-")  # the characters of the bar in ASCII


class Display:
    """Show events of a run, and the output of rank 0's script, on `stream` and standard error. Any thread may call the methods.

    Args:
        stream: where to show events and output; standard output by default.
        live: whether to show a progress bar; None shows one if `stream` is a terminal or this process is a notebook.
        verbose: if false, show only warnings, errors and what the script prints.
        bar: a function that creates another kind of bar.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        live: bool | None = None,
        verbose: bool = True,
        bar: Callable[[], Bar] | None = None,
    ) -> None:
        self._make_bar = bar if bar is not None or stream is not None else _cell_bar()
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = _is_terminal(self._stream)
        self._live = self._make_bar is not None or (self._is_terminal and _can_move()) if live is None else live
        self._verbose = verbose
        self._bar: Bar | None = None
        self._fresh_line = True  # whether the current line is empty
        self._rest = {False: "", True: ""}  # is standard error -> the script's incomplete line, with a progress bar
        self._lock = threading.RLock()

    def handle(self, event: Mapping[str, Any]) -> None:
        """Show one event. Do nothing for an unknown kind of event, or if the terminal was closed."""
        with contextlib.suppress(OSError):
            self._handle(event)

    def _handle(self, event: Mapping[str, Any]) -> None:
        kind = str(event.get("kind"))
        with self._lock:
            if kind == "error":
                self._show_line(str(event["text"]), to_stderr=True)
            elif kind == "warning":
                self._show_line(f"warning: {event['text']}", to_stderr=True)
            elif kind == "verbose":
                self._verbose = bool(event["value"])
                if not self._verbose:
                    self._remove_bar()
            elif self._verbose and (show := self._shows().get(kind)):
                show(event)

    def print_output(self, text: str, is_stderr: bool) -> None:
        """Show what rank 0's script wrote, unchanged. The bar stays below it."""
        with self._lock, contextlib.suppress(OSError):
            screen = self._screen()
            if screen is None:
                self._write(text, is_stderr)
                return
            whole, newline, self._rest[is_stderr] = (self._rest[is_stderr] + text).rpartition("\n")
            if newline:
                screen.print("\n".join(line.rpartition("\r")[2] for line in whole.split("\n")))

    def close(self) -> None:
        """Remove the bar and end the last line. May be called again. Later events are shown as plain lines."""
        with self._lock:
            self._remove_bar()
            self._live = False
            for is_stderr, rest in self._rest.items():
                if rest:
                    self._write(rest, is_stderr)
                self._rest[is_stderr] = ""
            if not self._fresh_line:
                self._write("\n", False)

    def _shows(self) -> dict[str, Callable[[Mapping[str, Any]], None]]:
        return {
            "started": self._lines,
            "finished": self._finished,
            "notice": lambda event: self._show_line(str(event["text"])),
            "row": lambda event: self._show_line(epoch_line(event["row"])),
            "log": self._log,
            "progress": self._progress,
        }

    def _lines(self, event: Mapping[str, Any]) -> None:
        for line in event["lines"]:
            self._show_line(str(line))

    def _finished(self, event: Mapping[str, Any]) -> None:
        self._remove_bar()
        self._lines(event)

    def _remove_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):  # the terminal was closed
                bar.stop()

    def _log(self, event: Mapping[str, Any]) -> None:
        if self._live:
            self._progress(event)
        else:
            self._show_line(GAP.join(progress_parts(event)))

    def _progress(self, event: Mapping[str, Any]) -> None:
        if not self._live:
            return
        if self._bar is None:
            self._bar = _TerminalBar(self._stream) if self._make_bar is None else self._make_bar()
        self._bar.show(event)

    def _screen(self) -> _TerminalBar | None:
        """Return the bar if it is in the terminal, where lines must be printed above it, else None."""
        return self._bar if isinstance(self._bar, _TerminalBar) else None

    def _show_line(self, line: str, *, to_stderr: bool = False) -> None:
        """Show one line of this package, never in the middle of a line of the script."""
        line = shown(line, keep="\n\t")
        if self._is_terminal and "\n" not in line:
            line = wrapped(line, shutil.get_terminal_size().columns)
        if (screen := self._screen()) is not None:
            screen.print(line)
            return
        self._write(("" if self._fresh_line else "\n") + line + "\n", to_stderr)

    def _write(self, text: str, to_stderr: bool) -> None:
        if not text:
            return
        stream = sys.stderr if to_stderr else self._stream
        try:
            stream.write(printable(text, stream))
            stream.flush()
        except OSError:  # the reader of the output has ended; the run and its logs go on
            return
        self._fresh_line = text.endswith("\n")


def printable(text: str, stream: TextIO) -> str:
    """Return `text` with the characters replaced that `stream` cannot encode."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def wrapped(line: str, width: int) -> str:
    """Return `line` broken between words for a terminal of `width` columns, with further lines indented."""
    return "\n".join(textwrap.wrap(line, max(width - 1, 20), subsequent_indent="  ", break_long_words=False)) or line


def _is_terminal(stream: TextIO) -> bool:
    return hasattr(stream, "isatty") and stream.isatty()


def _can_move() -> bool:
    """Return whether a line of the terminal can be overwritten."""
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class Bar(Protocol):
    """A progress bar."""

    def show(self, event: Mapping[str, Any]) -> None:
        """Show the progress in `event` instead of the earlier one."""

    def stop(self) -> None:
        """Remove the bar."""


def _cell_bar() -> Callable[[], Bar] | None:
    """Return a function that creates a bar in this notebook, or None if this process is not a notebook."""
    return CellBar if in_notebook() else None


class _TerminalBar:
    """A bar in one line at the bottom of the terminal, never wider than the terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._stream = stream
        self._console: Console = Console(file=stream, highlight=False, soft_wrap=True)
        self._event: Mapping[str, Any] = {}
        self._shown_at = 0.0
        self._live: Live = Live(
            get_renderable=self._line, console=self._console, transient=True, refresh_per_second=8,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start()

    def show(self, event: Mapping[str, Any]) -> None:
        self._event, self._shown_at = event, monotonic()

    def print(self, text: str) -> None:
        self._console.print(printable(text, self._stream), markup=False, highlight=False, emoji=False)

    def stop(self) -> None:
        self._live.stop()

    def _line(self) -> Any:
        from rich.text import Text

        event = self._event
        # A step may take long, so refresh the times even without a new event.
        if (elapsed := event.get("elapsed_s")) is not None:
            event = {**event, "elapsed_s": elapsed + monotonic() - self._shown_at}
        line = bar_line(event, self._console.width)
        return Text(printable(shown(line), self._stream), no_wrap=True, overflow="crop")
