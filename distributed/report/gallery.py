"""The section of a run's page with the newest image, text, table, audio and figure of each name that was logged."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path

from distributed.report.page import Section, escape, folded, table
from distributed.report.runs import MOST_MEDIA, Record, RunData
from distributed.runs.directory import is_below

_MOST = 60  # names that are shown
_LARGEST = 2_000_000  # bytes of a file that is part of the page
_LARGEST_SECTION = 16_000_000  # letters of the section
_ROWS, _LETTERS, _LETTERS_OF_TABLE = 50, 20_000, 100_000  # of a table and of a text


def logged_sections(run: RunData) -> list[Section]:
    """Return a list with the section, or an empty list if nothing was logged for it."""
    shown, left = [], _LARGEST_SECTION
    for record in run.media[:_MOST]:
        figure = _figure(record, _body(run.path, record))
        if len(figure) > left:
            figure = _figure(
                record, '<p class="caption">not shown, because the page would become too large: see RUN/media</p>'
            )
        shown.append(figure)
        left -= len(figure)
    if (more := len(run.media) - _MOST) > 0:
        least = "at least " if len(run.media) == MOST_MEDIA else ""
        shown.append(f'<p class="caption">{least}{more} more names: see RUN/media</p>')
    return [Section("Logged", "\n".join(shown))] if shown else []


def _figure(record: Record, body: str) -> str:
    rank = "" if record["rank"] is None else f", rank {record['rank']}"
    title = f"{record['name']} at step {record['step']}{rank}"
    return f"<figure>{body}<figcaption>{escape(title)}</figcaption></figure>"


def _body(run_dir: Path, record: Record) -> str:
    path, kind = run_dir / record["path"], record["kind"]
    try:
        if not is_below(path, run_dir / "media"):
            return f'<p class="caption">{escape(path.name)} is not in RUN/media</p>'
        size = path.stat().st_size
        if kind in ("text", "table"):
            with path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_LETTERS_OF_TABLE)
                is_whole = not file.read(1)
            return _table(text, is_whole=is_whole) if kind == "table" else f"<pre>{escape(text[:_LETTERS])}</pre>"
        if size > _LARGEST:
            return f'<p class="caption">{escape(path.name)} has {size / 1e6:.1f} MB: see RUN/media</p>'
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        return f'<p class="caption">{escape(path.name)} cannot be read ({escape(error.strerror)})</p>'
    if kind == "audio":
        return f'<audio controls src="data:audio/wav;base64,{content}"></audio>'
    return f'<img alt="" src="data:image/png;base64,{content}">'


def _table(text: str, *, is_whole: bool) -> str:
    """Return a table in HTML. If `text` is only the beginning, its last row is left out, because it may be cut off."""
    try:
        head, *rows = csv.reader(io.StringIO(text))
    except (csv.Error, ValueError):  # a very long cell, or an empty file
        return f"<pre>{escape(text[:_LETTERS])}</pre>"
    if not is_whole:
        rows = rows[:-1]
    drawn, count = table(head, rows[:_ROWS]), len(rows) - _ROWS
    if count > 0:
        drawn += folded(f"{count} more rows", table(head, rows[_ROWS : 20 * _ROWS]))
    return drawn if is_whole else f'{drawn}<p class="caption">the table has further rows: see RUN/media</p>'
