"""The section of a run's page with the newest image, text, table, audio and figure of each name that was logged."""

from __future__ import annotations

import base64
import csv
import io
from pathlib import Path

from distributed.report.page import Section, escape, folded, table
from distributed.report.runs import Record, RunData
from distributed.runs.directory import is_below

_MOST = 60  # names that are shown
_LARGEST = 2_000_000  # bytes of a file that is part of the page
_ROWS, _LETTERS = 50, 20_000  # of a table and of a text


def logged_sections(run: RunData) -> list[Section]:
    """Return a list with the section, or an empty list if nothing was logged for it."""
    newest: dict[tuple[str, str], Record] = {}
    for record in run.media:
        newest[str(record.get("name")), str(record.get("rank"))] = record
    shown = [_shown(run.path, record) for record in list(newest.values())[:_MOST]]
    if len(newest) > _MOST:
        shown.append(f'<p class="caption">{len(newest) - _MOST} more names: see RUN/media</p>')
    return [Section("Logged", "\n".join(shown))] if shown else []


def _shown(run_dir: Path, record: Record) -> str:
    rank = "" if record.get("rank") is None else f", rank {record['rank']}"
    title = f"{record.get('name')} at step {record.get('step')}{rank}"
    return f"<figure>{_body(run_dir, run_dir / str(record.get('path')), str(record.get('kind')))}<figcaption>{escape(title)}</figcaption></figure>"


def _body(run_dir: Path, path: Path, kind: str) -> str:
    if not is_below(path, run_dir / "media"):
        return f'<p class="caption">{escape(path.name)} is not in RUN/media</p>'
    try:
        size = path.stat().st_size
        if kind in ("text", "table"):
            with path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_LARGEST)
            return _table(text) if kind == "table" else f"<pre>{escape(text[:_LETTERS])}</pre>"
        if size > _LARGEST:
            return f'<p class="caption">{escape(path.name)} has {size / 1e6:.1f} MB: see RUN/media</p>'
        content = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        return f'<p class="caption">{escape(path.name)} cannot be read ({escape(error.strerror)})</p>'
    if kind == "audio":
        return f'<audio controls src="data:audio/wav;base64,{content}"></audio>'
    return f'<img alt="" src="data:image/png;base64,{content}">'


def _table(text: str) -> str:
    try:
        head, *rows = csv.reader(io.StringIO(text))
    except (csv.Error, ValueError):  # a very long cell, or an empty file
        return f"<pre>{escape(text[:_LETTERS])}</pre>"
    drawn = table(head, rows[:_ROWS])
    return (
        drawn
        if len(rows) <= _ROWS
        else drawn + folded(f"{len(rows) - _ROWS} more rows", table(head, rows[_ROWS : 20 * _ROWS]))
    )
