"""The page around the plots: one HTML file that needs no network. Tables are HTML; BokehJS, inside the file, draws the plots."""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.config.libraries import is_installed
from distributed.errors import ResourceError
from distributed.report.curves import STRETCHES
from distributed.report.panels import Panel

_HERE = Path(__file__).parent
_SCRIPTS = ("bokeh.min.js", "bokeh-api.min.js")
# The page contains all that it needs and may load nothing else.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; media-src data:"
)
# Three bars. Because the page contains an icon, the browser requests no favicon.
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 8 8'%3E"
    "%3Cpath fill='%230072b2' d='M1 5h1v2H1zM3 3h1v4H3zM5 1h1v6H5z'/%3E%3C/svg%3E"
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page: a heading and its HTML."""

    title: str
    body: str


def bokeh_scripts() -> str:
    """Return BokehJS from the bokeh package, without importing bokeh. Raises ResourceError if it is not installed."""
    spec = importlib.util.find_spec("bokeh")
    locations = spec.submodule_search_locations if spec is not None else None
    try:
        directory = Path(next(iter(locations or ())), "server", "static", "js")
        return "\n".join(_inline((directory / name).read_text(encoding="utf-8")) for name in _SCRIPTS)
    except (StopIteration, OSError):
        raise ResourceError(
            "a report needs bokeh, which is not installed: run pip install 'distributed-trainer[report]'"
        ) from None


def is_bokeh_here() -> bool:
    """Return whether bokeh is installed."""
    return is_installed("bokeh")


def page(
    title: str,
    under: str,
    before: Iterable[Section],
    panels: Sequence[Panel],
    after: Iterable[Section],
    longest_s: float,
) -> str:
    """Return the whole HTML file.

    Args:
        title: the heading of the page.
        under: the line below the heading.
        before: sections above the plots.
        panels: the plots.
        after: sections below the plots.
        longest_s: the length of the time axis in seconds.
    """
    unit, scale = next((unit, scale) for unit, scale, limit in _UNITS if longest_s <= limit)
    data = {"panels": [dataclasses.asdict(panel) for panel in panels], "time_unit": unit, "time_scale": scale}
    return "\n".join([
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">',
        f'<link rel="icon" href="{_ICON}">',
        f"<style>\n{_own('page.css')}</style>\n</head>\n<body>\n<main>",
        f'<h1>{escape(title)}</h1>\n<p class="under">{escape(under)}</p>',
        *map(_section, before),
        _CONTROLS if panels else "",
        *_plots(panels),
        *map(_section, after),
        f"<footer>{_FOOTER}</footer>\n</main>",
        f'<script type="application/json" id="page-data">{_inline_json(data)}</script>',
        f"<script>{bokeh_scripts()}</script>\n<script>\n{_own('page.js')}</script>\n</body>\n</html>\n",
    ])  # fmt: skip


_UNITS = (("s", 1, 300), ("min", 60, 4 * 3600), ("h", 3600, 4 * 86400), ("days", 86400, float("inf")))
_CONTROLS = """<div class="controls"><div><span>Axis</span>
<button data-control="axis" data-value="step" aria-pressed="true">step</button>
<button data-control="axis" data-value="time" aria-pressed="false">time</button></div>
<div><span>Scale</span>
<button data-control="scale" data-value="linear" aria-pressed="true">linear</button>
<button data-control="scale" data-value="log" aria-pressed="false">log</button></div></div>"""
_FOOTER = (
    f"A curve of more than {2 * STRETCHES} points shows the smallest and the largest value of each of {STRETCHES} equal"
    " stretches. A click in a legend hides a line. Times count from the first record of a run."
)


@functools.cache
def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _inline_json(data: Any) -> str:
    """Return JSON for a script element. User strings may contain `</script` or `<!--`, so `<` is escaped."""
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def _inline(text: str) -> str:
    """Return a script for a script element, with `</` and `<!--` escaped."""
    return text.replace("</", "<\\/").replace("<!--", "<\\!--")


def _section(section: Section) -> str:
    heading = f"<h2>{escape(section.title)}</h2>\n" if section.title else ""
    return f"<section>\n{heading}{section.body}\n</section>"


def _plots(panels: Sequence[Panel]) -> Iterable[str]:
    """Yield the HTML of each heading: the heading itself, and an empty element for each plot below it."""
    for heading in dict.fromkeys(panel.heading for panel in panels):
        inside = [_panel_html(number, panel) for number, panel in enumerate(panels) if panel.heading == heading]
        yield f'<h2>{escape(heading)}</h2>\n<div class="panels">\n' + "\n".join(inside) + "\n</div>"


def _panel_html(number: int, panel: Panel) -> str:
    caption = f'<p class="caption">{escape(panel.caption)}</p>' if panel.caption else ""
    wide = " wide" if panel.is_wide else ""
    return (
        f'<article class="panel{wide}" id="panel-{number}"><h3>{escape(panel.title)}</h3><div class="legend"></div>'
        f'<div class="scroll"><div class="plot"></div></div>{caption}</article>'
    )


# ------------------------------------------------------------------ pieces of HTML


def escape(value: Any) -> str:
    return html.escape(str(value))


def facts(values: Mapping[str, str], marks: Mapping[str, str] | None = None) -> str:
    """Return a box for each name and value. `marks` maps names to CSS classes."""
    boxes = [
        f'<div><dt>{escape(name)}</dt><dd class="{(marks or {}).get(name, "")}">{escape(value)}</dd></div>'
        for name, value in values.items()
    ]
    return f'<dl class="facts">{"".join(boxes)}</dl>'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    colors: Sequence[int] = (),
    best: int | None = None,
    is_tight: bool = False,
) -> str:
    """Return an HTML table.

    Args:
        head: the headings of the columns.
        rows: the cells, row by row.
        colors: for each row, the palette number of the swatch in its first cell.
        best: the number of a row to highlight.
        is_tight: whether to use the narrow style.
    """
    lines = []
    for number, row in enumerate(rows):
        swatch = f'<i data-color="{colors[number]}"></i>' if colors else ""
        cells = "".join(f"<td>{swatch if not column else ''}{escape(cell)}</td>" for column, cell in enumerate(row))
        lines.append(f'<tr class="best">{cells}</tr>' if number == best else f"<tr>{cells}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table{" tight" if is_tight else ""}"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def folded(summary: str, body: str) -> str:
    """Return a section that opens on a click."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"
