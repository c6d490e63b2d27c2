"""Build tables and short texts of the reference as docutils nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from docutils import nodes

Cell = str | Sequence[nodes.Node]


def inline(text: str) -> list[nodes.Node]:
    """Return `text` as nodes. Words in single backticks become literals."""
    parts = re.split(r"`([^`]+)`", text)
    return [nodes.literal("", part) if number % 2 else nodes.Text(part) for number, part in enumerate(parts) if part]


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], *classes: str) -> nodes.table:
    """Return a table with the CSS `classes`. A row of one cell is a heading that spans all columns."""
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=1) for _ in head]
    group += nodes.thead("", _row(head))
    group += nodes.tbody("", *(_row(cells, len(head)) for cells in rows))
    return nodes.table("", group, classes=["reference-table", *classes])


def _row(cells: Sequence[Cell], width: int = 0) -> nodes.row:
    row = nodes.row()
    for cell in cells:
        entry = nodes.entry()
        if len(cells) == 1 < width:
            entry["morecols"] = width - 1
            entry["classes"] = ["heading"]
        content = inline(cell) if isinstance(cell, str) else list(cell)
        is_blocks = all(isinstance(node, nodes.paragraph) for node in content)  # also without any content
        entry += content if is_blocks else [nodes.paragraph("", "", *content)]
        row += entry
    return row


def target(anchor: str, *content: nodes.Node) -> nodes.inline:
    """Return `content` with an anchor that pages can link to as `#ANCHOR`."""
    return nodes.inline("", "", *content, ids=[anchor])


def slug(text: str) -> str:
    """Return `text` as an anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
