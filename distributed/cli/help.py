"""The help of every command in one style: usage, purpose, flags in sections and examples, in 80 columns."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80
_NAMES = 36  # column at which the texts of flags begin
Rows = Sequence[tuple[str, str]]  # a flag or argument as it is written, and its text


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps each flag on one line with its text, at 80 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_NAMES, width=WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def sections_text(sections: Iterable[tuple[str, Rows]]) -> str:
    """Return sections of flags as argparse writes them. Empty sections are left out."""
    formatter = HelpFormatter("")
    for title, rows in sections:
        formatter.start_section(title)
        for name, text in rows:
            formatter.add_argument(argparse.Action([], name, metavar=name, help=text.replace("%", "%%")))
        formatter.end_section()
    return formatter.format_help()


def paragraphs(text: str) -> str:
    """Return the paragraphs of a docstring, wrapped."""
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in parts)
