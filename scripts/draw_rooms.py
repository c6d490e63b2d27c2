"""Draw the rooms of the package into docs/images/rooms.svg.

python scripts/draw_rooms.py            write the picture
python scripts/draw_rooms.py --check    exit with 1 if the picture differs from the code

The layers come from pyproject.toml, the sentences from the docstrings of the rooms.
"""

from __future__ import annotations

import argparse
import ast
import html
import sys
import textwrap
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "rooms.svg"
WIDTH, NAME_WIDTH, LINE, PAD, GAP = 960, 206, 19, 9, 8
COLUMNS = 92  # characters of a line of a sentence
STYLE = (
    "text{font:14px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
    ".name{font-weight:600;font-family:ui-monospace,Menlo,Consolas,monospace}"
    ".room{fill:#fff;stroke:#8c959f}.page{fill:#f6f8fa}.arrow{stroke:#57606a;stroke-width:1.5;fill:none}"
)


def layers() -> list[list[str]]:
    """Return the names of each layer, the highest layer first."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = content["tool"]["importlinter"]["contracts"]
    return [[name.strip() for name in layer.split(":")] for layer in contract["layers"]]


def sentence(name: str) -> str:
    """Return the first line of the docstring of a room or a module of the package."""
    place = ROOT / "distributed" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def picture() -> str:
    """Return the SVG: a row for each room, grouped by layers, and an arrow in the direction of imports."""
    rows, y = [], 16 + PAD
    for layer in layers():
        for name in layer:
            lines = textwrap.wrap(sentence(name).replace("`", ""), COLUMNS)
            height = LINE * len(lines) + 2 * PAD
            rows.append(f'<rect class="room" x="40" y="{y}" width="{WIDTH - 56}" height="{height}" rx="5"/>')
            rows.append(f'<text class="name" x="52" y="{y + PAD + 14}">{html.escape(name)}</text>')
            for place, text in enumerate(lines):
                rows.append(f'<text x="{52 + NAME_WIDTH}" y="{y + PAD + 14 + place * LINE}">{html.escape(text)}</text>')
            y += height + (2 if name != layer[-1] else GAP)
    bottom = y + 8
    arrow = f'<path class="arrow" d="M20 {16 + PAD}V{bottom - 22}m-5 -8l5 8l5 -8"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom}" width="{WIDTH}" height="{bottom}" role="img"'
        f' aria-label="The rooms of the package; each imports those below it">\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{bottom}"/>\n{arrow}\n' + "\n".join(rows) + "\n</svg>\n"
    )


def main() -> int:
    """Write or check the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the picture is what the code says")
    drawn = picture()
    if parser.parse_args().check:
        if PICTURE.exists() and PICTURE.read_text() == drawn:
            return 0
        sys.stderr.write(f"{PICTURE.relative_to(ROOT)} is not what the code says: run python scripts/draw_rooms.py\n")
        return 1
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
