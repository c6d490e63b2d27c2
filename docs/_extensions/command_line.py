"""The directive `command-line`, which draws the help of every command from what `--help` prints."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tables
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from distributed.cli.__main__ import run
from distributed.cli.examples import EXAMPLES

Rows = list[tuple[str, str]]
SHARED = "train"  # the flags that other commands take too are shown once, with this command


@dataclass
class Help:
    """The parts of a help text: usage, paragraphs, sections of flags and arguments, examples."""

    usage: str
    about: list[str]
    sections: dict[str, Rows] = field(default_factory=dict)
    examples: str = ""


def help_text(words: str) -> str:
    """Return what `distributed WORDS --help` prints."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        run([*words.split(), "--help"])
    return shown.getvalue()


def parse(text: str) -> Help:
    """Return the parts of a help text, which has the style of `distributed.cli.help`."""
    head, *rest = re.split(r"^(\S.*):$", text, flags=re.M)
    usage, *about = head.strip().split("\n\n")
    found = Help(usage.removeprefix("usage: "), [" ".join(each.split()) for each in about])
    for title, lines in zip(rest[::2], rest[1::2], strict=True):
        if title == "Examples":
            found.examples = re.sub(r"^  ", "", lines.strip("\n"), flags=re.M)
        else:
            found.sections[title] = list(_rows(lines.splitlines()))
    return found


def _rows(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    name, words = "", []
    for line in filter(None, lines):
        start = re.fullmatch(r"  (\S.*?)(?:  +(\S.*))?", line)
        if start is None:
            words.append(line.strip())
            continue
        if name:
            yield name, " ".join(words)
        name, words = start[1], [start[2]] if start[2] else []
    if name:
        yield name, " ".join(words)


class CommandLine(SphinxDirective):
    """Draw one section for each command."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found = {words: parse(help_text(words)) for words in EXAMPLES}
        shared = {row for rows in found[SHARED].sections.values() for row in rows}
        return [_section(words, each, shared) for words, each in found.items() if words]


def _section(words: str, found: Help, shared: set[tuple[str, str]]) -> nodes.section:
    title = f"distributed {words}"
    section = nodes.section(ids=[tables.slug(title)], names=[title])
    section += nodes.title("", title)
    section += [nodes.paragraph("", "", *tables.inline(text)) for text in found.about]
    section += _code(found.usage, "text")
    is_part = words != SHARED and _takes_shared(found, shared)
    if is_part:
        link = nodes.reference("", "", nodes.literal("", f"distributed {SHARED}"), refid=f"distributed-{SHARED}")
        text = ("The command also takes the flags of ", link, " that are not in this table.")
        section += nodes.paragraph("", "", *(nodes.Text(each) if isinstance(each, str) else each for each in text))
    rows: list[tuple[tables.Cell, ...]] = []
    for name, all_rows in found.sections.items():
        kept = [row for row in all_rows if not (is_part and row in shared)]
        if kept:
            rows += [(name,), *((_flag(words, flag), text) for flag, text in kept)]
    if rows:
        section += tables.table(("flag or argument", "meaning"), rows, "flags-table")
    section += _code(found.examples, "bash")
    return section


def _takes_shared(found: Help, shared: set[tuple[str, str]]) -> bool:
    rows = [row for rows in found.sections.values() for row in rows]
    return sum(row in shared for row in rows) > len(shared) / 2


def _flag(words: str, written: str) -> list[nodes.Node]:
    flag = re.search(r"--(?:\[no-\])?([\w-]+)", written)
    literal = nodes.literal("", written)
    return [tables.target(tables.slug(f"{words}-{flag[1]}"), literal) if flag else literal]


def _code(text: str, language: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
