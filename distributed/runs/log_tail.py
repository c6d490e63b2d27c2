"""Read the end of a rank's log: its last line, and the message with which C++ ended the process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from distributed.config.reading import LimitError, open_regular

_TAIL_BYTES = 64 * 1024
_MOST_TEXT = 4000  # characters of a line
_MOST_MESSAGE = 300  # characters of a message of C++
_CRASH = "Fatal Python error: "  # begins the stacks that a worker writes when a signal such as SIGSEGV ends it
_NOTE = re.compile(r"(\[rank\d+\]:)?\[[IW]\d{4} [\d:.]+ [^\]]+\] ")  # begins a note or a warning of torch's C++
# std::terminate of libstdc++ writes the message of the exception after this word. Messages of some libraries begin with the source
# location in brackets, which is left out.
_WHAT = re.compile(r"what\(\):\s+(?:\[.*?\] )*(.+)")


def tail(path: Path, start: int = 0) -> list[bytes]:
    """Return the last complete lines of a file from the byte `start` on, or nothing if it cannot be read."""
    try:
        with open_regular(path) as file:
            begin = max(start, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read(_TAIL_BYTES).splitlines()
    except (OSError, LimitError):
        return []
    return lines[1:] if begin > start else lines


def last_line(log: Path) -> str:
    """Return the last line of a log before the stacks of a crash, without its prefix. Notes and warnings of torch's C++ do not count."""
    lines = _texts(log, 0)
    crash = next((index for index in range(len(lines) - 1, -1, -1) if lines[index].startswith(_CRASH)), len(lines))
    lines = lines[:crash]
    line = next((line[:_MOST_TEXT] for line in reversed(lines) if line and not _NOTE.match(line)), "")
    return _WHAT.sub(r"\1", line)


def abort_message(log: Path, start: int) -> str:
    """Return the message with which C++ ended the process that has written `log` since the byte `start`, or "" if there is none."""
    found = [match for line in _texts(log, start) if (match := _WHAT.match(line))]
    return found[-1][1][:_MOST_MESSAGE] if found else ""


def _texts(log: Path, start: int) -> list[str]:
    return [line.decode(errors="replace").partition("] ")[2].strip() for line in tail(log, start)]
