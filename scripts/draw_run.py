"""Draw a real run as a terminal would show it, docs/images/run.svg: `python scripts/draw_run.py`. Takes half a minute."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "run.svg"
COMMAND = "distributed train --script examples/train.py --nproc-per-node 2 --epochs 4 --run-dir runs/digits"
COLUMNS = 108


def main(image: Path = IMAGE) -> None:
    """Run the command in a terminal of its own and save what it showed."""
    with tempfile.TemporaryDirectory(prefix="draw-run-") as name:
        Path(name, "examples").symlink_to(ROOT / "examples")
        shown = in_terminal([sys.executable, "-m", "distributed.cli", *COMMAND.split()[1:]], Path(name))
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(f"$ {COMMAND}\n{last_drawn(shown)}\n"))
        drawn = console.export_svg(title="distributed train")
    image.write_text(without_fonts(drawn))


def in_terminal(argv: list[str], directory: Path) -> str:
    """Run `argv` in a terminal of `COLUMNS` columns and return all that it wrote. Raises CalledProcessError if it fails."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(argv, cwd=directory, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while data := _read(ours):
        shown += data
    os.close(ours)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, argv, shown)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the last process has closed the terminal
        return b""


def last_drawn(shown: str) -> str:
    """Return the text that is left on the screen: without the progress lines, which rich erases and draws again."""
    lines, row = [""], 0
    for piece in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[\?\d+[hl])", shown):
        if piece == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif piece == "\x1b[1A":
            row -= 1
        elif piece == "\x1b[2K":
            lines[row] = ""
        elif not piece.startswith(("\r", "\x1b[?")):
            lines[row] += piece
    return "\n".join(lines).strip()


def without_fonts(drawn: str) -> str:
    """Return the SVG without the fonts that rich loads from the network."""
    drawn = re.sub(r"<!-- .*? -->\s*", "", drawn, flags=re.S)
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.S).replace("Fira Code", "ui-monospace, Consolas")


if __name__ == "__main__":
    main()
