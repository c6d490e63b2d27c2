"""Description of the machine that is printed with every figure."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
from pathlib import Path


def describe(*libraries: str) -> str:
    """Return hardware, versions (`libraries` included), load and command as a few lines of Markdown."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in facts if "model name" in line), platform.machine())
    release = platform.release().split("-")[0]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", *libraries))
    return (
        f"{len(os.sched_getaffinity(0))} cores of {cpu}, {platform.system()} {release},"
        f" load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}, {versions}\n"
        f"command: python {' '.join(sys.argv)}"
    )


def spread(values: list[float]) -> str:
    """Return the values as text: median (smallest-largest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(rows: list[list[str]]) -> str:
    """Return the rows as a Markdown table. The first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(rows[0]), rule, *map(line, rows[1:])])
