"""`distributed backends`: list the backends, what is not installed, and which setting works on which backend."""

from __future__ import annotations

import json
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import typer

from distributed.backends.capabilities import (
    Capabilities,
    all_capabilities,
    capabilities_of,
    everywhere,
    table,
    to_json,
)
from distributed.config.registry import backend_entry

_WIDTH = 80


def backends(
    name: Annotated[
        str | None, typer.Argument(help="show the options of this backend and the settings that it refuses")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON list")] = False,
) -> None:
    """Show which setting works on which backend, and what is not installed. Loads no engine."""
    found = all_capabilities() if name is None else [capabilities_of(backend_entry(name))]
    if as_json:
        print(json.dumps([to_json(each) for each in found], indent=1))
        return
    for line in _lines(found) if name is None else _lines_of(found[0]):
        print(line)


def _lines(found: Sequence[Capabilities]) -> Iterator[str]:
    width = max(len(each.backend) for each in found)
    for each in found:
        yield from _wrapped(f"{each.backend:<{width}}  {each.summary}", indent=width + 2)
        if each.missing:
            yield from _wrapped(
                f"{'':<{width}}  not installed here ({', '.join(each.missing)}): run {each.install}", indent=width + 2
            )
    rows = table(found)
    first = max(map(len, rows), default=0)
    yield ""
    names = [each.group for each in found]
    gap = "  " if len("  ".join(["x" * first, *names])) <= _WIDTH else " "
    yield gap.join(["setting".ljust(first), *names])
    letters = _letters(found, rows)
    for name, cells in rows.items():
        words = [(cells[each.backend] + _marks(letters, each, name)).ljust(len(each.group)) for each in found]
        yield gap.join([name.ljust(first), *words]).rstrip()
    yield ""
    for when, letter in letters.items():
        yield from _wrapped(f"if {letter}: refused {when}", indent=2)
    yield ""
    yield from _wrapped(f"on every backend: {', '.join(everywhere(found))}", indent=2)
    yield ""
    yield "reasons and the options of a backend: distributed backends NAME"


def _letters(found: Sequence[Capabilities], rows: Iterable[str]) -> dict[str, str]:
    """Return condition -> its letter in the table, for each condition under which a setting is refused."""
    whens = [condition.when for name in rows for each in found for condition in each.conditions_of(name)]
    return dict(zip(dict.fromkeys(whens), string.ascii_lowercase, strict=False))


def _marks(letters: Mapping[str, str], each: Capabilities, setting: str) -> str:
    own = dict.fromkeys(letters[condition.when] for condition in each.conditions_of(setting))
    return " " + "".join(own) if own else ""


def _lines_of(each: Capabilities) -> Iterator[str]:
    yield from _wrapped(f"{each.backend}: {each.summary}", indent=2)
    if each.missing:
        yield from _wrapped(f"not installed here ({', '.join(each.missing)}): run {each.install}", indent=2)
    yield ""
    yield (
        f"options ({each.group}.NAME by --set and in YAML, {each.group}={{...}} in code):"
        if each.options
        else "no options"
    )
    width = max(map(len, each.options), default=0)
    for name, text in each.options.items():
        yield from _wrapped(f"  {name:<{width}}  {text}", indent=width + 4)
    yield ""
    refuses = [(name, reason) for name, reason in each.refuses.items()]
    refuses += [(f"{name} {one.when}", one.reason) for name, several in each.conditions.items() for one in several]
    yield "refuses:" if refuses else "refuses no setting that another backend accepts"
    for name, reason in refuses:
        yield from _wrapped(f"  {name}: {reason}", indent=4)
    yield ""
    yield "has an effect only with"
    for what in dict.fromkeys(each.needs.values()):
        yield from _wrapped(f"  {what}: {', '.join(name for name in each.needs if each.needs[name] == what)}", indent=4)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * indent, drop_whitespace=True, break_long_words=False,
        break_on_hyphens=False, initial_indent="",
    ) or [""]  # fmt: skip
