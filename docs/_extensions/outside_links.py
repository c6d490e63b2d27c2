"""Let pages of the site show files of the repository that lie outside of docs/, and link to them.

The line `<!-- text of FILE -->` in a page stands for the Markdown of FILE. Links work in the repository and on the site: a link to a
file that a page of the site shows leads to that page, any other file is copied into the site, and a directory is named without a link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

# File of the repository -> the page of the site that a link to it leads to.
SHOWN = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "docker/README.md": "project/docker.md",
}
_SHOW = re.compile(r"^<!-- text of (\S+) -->$", re.M)
_LINK = re.compile(r"(?<!!)\[([^\]\[]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def rewrite(text: str, page: Path, file: Path, docs: Path) -> str:
    """Return the Markdown `text` with links that work on the site.

    Args:
        text: Markdown. Fenced code in it is not changed.
        page: the page of the site that shows the text.
        file: the file that holds the text, from which its links start.
        docs: the directory of the pages.
    """
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(
        part if number % 2 else _LINK.sub(lambda link: _written(link, page, file, docs), part)
        for number, part in enumerate(parts)
    )


def _written(link: re.Match[str], page: Path, file: Path, docs: Path) -> str:
    text, anchor = link[1], link[3] or ""
    target = (file.parent / link[2]).resolve()
    if not target.exists() or (page == file and target.is_relative_to(docs)):
        return link[0]  # Sphinx checks it
    name = target.relative_to(docs.parent).as_posix()
    if name not in SHOWN and not target.is_relative_to(docs) and (target.is_dir() or target.suffix == ".md"):
        return text if "`" in text else f"`{text}`"
    target = docs / SHOWN.get(name, os.path.relpath(target, docs))
    return f"[{text}]({Path(os.path.relpath(target, page.parent)).as_posix()}{anchor})"


def _on_read(app: Sphinx, docname: str, source: list[str]) -> None:
    page, docs = Path(app.env.doc2path(docname)), Path(app.srcdir)
    source[0] = rewrite(source[0], page, page, docs)
    for name in _SHOW.findall(source[0]):
        file = docs.parent / name
        app.env.note_dependency(str(file))
        text = rewrite(file.read_text(), page, file, docs)
        source[0] = source[0].replace(f"<!-- text of {name} -->", text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("source-read", _on_read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
