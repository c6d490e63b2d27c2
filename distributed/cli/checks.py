"""The lines of `distributed doctor`: what was checked, and with which result."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

from typer import Exit

OK, BAD, MISSING, INFO = "ok", "bad", "missing", "info"


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the result. `BAD` prevents the default backends from working; `MISSING` is optional."""

    subject: str
    status: str
    detail: str


def show(found: Iterable[Check], good: str, bad: str) -> None:
    """Print the checks and a last line, which is `good`, or `bad` with the names of the bad checks. Exit with 3 if there is a bad check."""
    checks = []
    for check in found:
        checks.append(check)
        if not sys.stdout.isatty():
            print(f"{check.status:<8}{check.subject:<20}{check.detail}", flush=True)
    if sys.stdout.isatty():
        _show_table(checks)
    names = list(dict.fromkeys(check.subject for check in checks if check.status == BAD))
    print(f"{bad}: {', '.join(names)}" if names else good)
    if names:
        raise Exit(3)


def _show_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {OK: "green", BAD: "red", MISSING: "yellow", INFO: "cyan"}
    table = Table(box=None, pad_edge=False)
    for title in ("check", "", "detail"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(check.subject, f"[{colours[check.status]}]{check.status}[/]", _escaped(check.detail))
    Console().print(table)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
