"""Draw the pictures of the pages in docs/concepts into docs/images/concept-NAME.svg.

python scripts/draw_concepts.py            write the pictures
python scripts/draw_concepts.py --check    exit with 1 if a picture differs from what this script draws

The letters are large enough to be read if a picture is shown 400 pixels wide.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 640
STYLE = (
    "text{font:20px -apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#1f2328}"
    ".bold{font-weight:600}.small{font-size:18px}.mid{text-anchor:middle}.end{text-anchor:end}.red{fill:#b42318}"
    ".page{fill:#fff}.box{fill:#f6f8fa;stroke:#8c959f}.a{fill:#b6d7ff;stroke:#0b5cad}.b{fill:#ffd8a8;stroke:#b35900}"
    ".c{fill:#c9ecc9;stroke:#2b7a2b}.d{fill:#e2ccff;stroke:#6f3fb5}.none{fill:#fff;stroke:#8c959f;stroke-dasharray:4 4}"
    ".line{stroke:#57606a;stroke-width:2;fill:none}.cross{stroke:#b42318;stroke-width:4;fill:none}"
)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text. `kind` holds class names: bold, small, mid, end, red."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"/>'


def labelled(x: float, y: float, width: float, height: float, words: str, kind: str = "box") -> str:
    """Return a box with a text in its middle."""
    return box(x, y, width, height, kind) + text(x + width / 2, y + height / 2 + 7, words, "mid small")


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a horizontal or vertical arrow."""
    head = "m-8 -6l8 6l-8 6" if to_y == y else "m-6 -8l6 8l6 -8"
    return f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}{head}"/>'


def cross(x: float, y: float) -> str:
    """Return a red cross around a point."""
    return f'<path class="cross" d="M{x - 9:g} {y - 9:g}l18 18m0 -18l-18 18"/>'


def svg(label: str, height: float, parts: list[str]) -> str:
    """Return the file of a picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img"'
        f' aria-label="{html.escape(label)}">\n<style>{STYLE}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height:g}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def batch_equation() -> str:
    """One step of two processes with two micro-batches each."""
    parts = [text(20, 36, "one step = one global batch of 64 samples", "bold")]
    for column in range(2):
        parts.append(text(255 + 220 * column, 74, f"micro-batch {column + 1}", "mid small"))
    for row, kind in enumerate("ab"):
        parts.append(text(20, 119 + 74 * row, f"process {row}"))
        parts += [labelled(150 + 220 * column, 86 + 74 * row, 210, 56, "16 samples", kind) for column in range(2)]
    parts += [arrow(255, 222, 255, 256), arrow(475, 222, 475, 256)]
    parts.append(labelled(150, 262, 430, 44, "sum of gradients, one optimizer update"))
    parts.append(text(20, 348, "64  =  16  x  2  x  2", "bold"))
    parts.append(text(20, 378, "global batch = batch_size x micro-batches x processes", "small"))
    return svg("A step: two processes with two micro-batches of 16 samples are one global batch of 64", 396, parts)


def order() -> str:
    """The same eight samples of a step on one, two and four processes."""
    samples, kinds = [5, 2, 7, 0, 3, 6, 1, 4], "abcd"
    parts = [text(20, 36, "order of the epoch: from seed and epoch", "bold")]
    for row, count in enumerate((1, 2, 4)):
        y = 60 + 104 * row
        parts.append(text(20, y + 22, f"{count} process{'es' * (count > 1)}", "small"))
        for place, sample in enumerate(samples):
            parts.append(labelled(20 + 75 * place, y + 32, 69, 44, str(sample), kinds[place % count]))
    parts.append(text(20, 390, "process", "small"))
    parts += [labelled(110 + 75 * rank, 368, 69, 32, str(rank), kinds[rank]) for rank in range(4)]
    parts.append(text(20, 436, "The step has the same samples on every number of processes.", "small"))
    return svg("The samples of a step are the same on one, two and four processes, which take turns", 454, parts)


def checkpoints() -> str:
    """The stages of a save, and what a crash in each of them leaves."""
    steps = [
        ("write tensors and state", "in .tmp-step-00000120"),
        ("sync every file to the disk", "and record its digest"),
        ("write manifest.json", "it seals the checkpoint"),
        ("rename to step-00000120", "one atomic operation"),
    ]
    parts = [text(20, 36, "saving step 120", "bold"), text(620, 36, "a kill here leaves", "bold end")]
    for row, (what, detail) in enumerate(steps):
        y, is_last = 56 + 96 * row, row == len(steps) - 1
        parts += [
            box(20, y, 330, 68, "c" if is_last else "a"),
            text(36, y + 28, what),
            text(36, y + 54, detail, "small"),
        ]
        parts += [] if is_last else [arrow(185, y + 70, 185, y + 92)]
        left, kind = ("step 120", "c") if is_last else ("step 100", "box")
        parts.append(labelled(440, y + 12, 180, 44, left, kind))
        parts.append(arrow(360, y + 34, 430, y + 34))
    parts.append(text(20, 468, "A checkpoint is either complete or not there.", "small"))
    return svg(
        "A save writes, syncs, seals and renames; a kill before the rename leaves the checkpoint before it", 486, parts
    )


def backends() -> str:
    """What each of two processes holds between two steps."""
    rows = [
        ("pytorch-ddp, horovod", (False, False, False)),
        ("tensorflow", (False, False, False)),
        ("deepspeed stage 1", (False, False, True)),
        ("deepspeed stage 2", (False, True, True)),
        ("deepspeed stage 3, fsdp", (True, True, True)),
    ]
    parts = [text(20, 36, "what each of two processes holds between two steps", "bold")]
    for process in range(2):
        parts.append(text(347 + 192 * process, 76, f"process {process}", "mid small"))
    for row, (name, is_cut) in enumerate(rows):
        y = 90 + 62 * row
        parts.append(text(20, y + 31, name, "small"))
        for process in range(2):
            for place, (letter, kind) in enumerate(zip("PGO", "abc", strict=True)):
                x = 260 + 192 * process + 60 * place
                parts.append(box(x, y, 54, 46, "none"))
                width = 27 if is_cut[place] else 54
                parts.append(box(x + 27 * process * is_cut[place], y, width, 46, kind))
                parts.append(text(x + 27, y + 30, letter, "mid small"))
    for x, letter, word, kind in (
        (20, "P", "parameters", "a"),
        (200, "G", "gradients", "b"),
        (370, "O", "optimizer state", "c"),
    ):
        parts += [labelled(x, 416, 36, 32, letter, kind), text(x + 46, 439, word, "small")]
    parts.append(text(20, 482, "Half a box: each process holds one half.", "small"))
    return svg("Which backend keeps parameters, gradients and optimizer state whole and which shards them", 500, parts)


def failures() -> str:
    """A killed worker, and the attempt that continues from the newest checkpoint."""
    parts = [text(20, 36, "rank 1 is killed in step 7", "bold")]
    for attempt, (first, last) in enumerate(((1, 6), (5, 10))):
        top = 84 + 168 * attempt
        parts.append(text(20, top - 14, f"attempt {attempt}"))
        for rank, kind in enumerate("ab"):
            y = top + 54 * rank
            parts.append(text(20, y + 30, f"rank {rank}", "small"))
            for step in range(first, last + 1):
                parts.append(labelled(100 + 52 * (step - 1), y, 48, 44, str(step), kind))
    parts += [cross(100 + 52 * 6 + 22, 84 + 54 + 22), text(100 + 52 * 6 + 48, 84 + 54 + 30, "killed", "red")]
    parts += ['<path class="line" d="M306 76V366"/>', text(306, 390, "checkpoint of step 4", "mid small")]
    parts.append(text(20, 428, "All ranks start again from the newest verified checkpoint.", "small"))
    parts.append(text(20, 454, "Steps 5 and 6 are repeated with the same numbers.", "small"))
    return svg("Rank 1 is killed in step 7; both ranks start again after the checkpoint of step 4", 472, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "batch-equation": batch_equation,
    "order-and-randomness": order,
    "checkpoints": checkpoints,
    "backends": backends,
    "failures-and-restarts": failures,
}


def main() -> int:
    """Write or check the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether the pictures are what the script draws")
    is_check = parser.parse_args().check
    wrong = []
    for name, draw in PICTURES.items():
        file = IMAGES / f"concept-{name}.svg"
        if not is_check:
            file.write_text(draw())
        elif not file.exists() or file.read_text() != draw():
            wrong.append(file.relative_to(ROOT).as_posix())
    if wrong:
        sys.stderr.write(f"{', '.join(wrong)}: not what the script draws: run python scripts/draw_concepts.py\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
