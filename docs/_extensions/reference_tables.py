"""Directives that draw the tables of the reference from the code: `settings-table`, `backends-table`, `exit-codes`."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Iterator
from typing import Any

import tables
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import distributed
from distributed import errors
from distributed.backends.capabilities import NO_SETTINGS, Capabilities, all_capabilities, field_of
from distributed.backends.effects import EFFECTS
from distributed.config.fields import Rule, in_words, rules
from distributed.config.flags import as_flag
from distributed.config.registry import option_class
from distributed.config.settings import GROUPS, DistributedConfig, group_options

_KINDS = {int: "int", float: "float", bool: "bool", str: "str", dict: "mapping", tuple: "pair of floats"}


class SettingsTable(SphinxDirective):
    """Draw every setting and every option of a backend in one table."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        head = ("name", "type", "default", "flag", "meaning", "refused by")
        return [tables.table(head, _settings(all_capabilities()), "settings-table")]


def _settings(backends: list[Capabilities]) -> Iterator[tuple[tables.Cell, ...]]:
    section = ""
    for name, rule in rules(DistributedConfig).items():
        if name in GROUPS:
            continue
        if rule.section != section:
            section = rule.section
            yield (section,)
        needs = " and ".join(need.what for need in EFFECTS[name])
        yield _row(name, rule, needs, _refused(name, backends))
    yield ("Options of the data pipeline",)
    for option, rule in rules(group_options("data")).items():
        name = f"data.{option}"
        yield _row(name, rule, "", _refused(name, backends))
    for each in backends:
        found = rules(option_class(each.group))
        if found:
            yield (f"Options of {each.backend}",)
        for option, rule in found.items():
            name = f"{each.group}.{option}"
            yield _row(
                name, rule, each.needs.get(name, ""), [nodes.Text("as a flag: backends without this option group")]
            )


def _row(name: str, rule: Rule, needs: str, refused: list[nodes.Node]) -> tuple[tables.Cell, ...]:
    meaning = [nodes.paragraph("", "", *tables.inline(rule.help))]
    if needs:
        meaning.append(nodes.paragraph("", "", *tables.inline(f"Has an effect only with {needs}."), classes=["needs"]))
    named = [tables.target(f"setting-{tables.slug(name)}", nodes.literal("", name))]
    default = "not set" if rule.default is None or rule.default == {} else f"`{in_words(rule.default)}`"
    return named, _type(rule), default, f"`{as_flag(name, None)}`", meaning, refused


def _type(rule: Rule) -> str:
    if rule.choices is not None and bool not in rule.kinds:
        return ", ".join(f"`{in_words(each)}`" for each in rule.choices)
    text = " or ".join(_KINDS[kind] for kind in rule.kinds)
    if rule.choices is not None:
        return f"{text}: {', '.join(f'`{each}`' for each in rule.choices if isinstance(each, str))}"
    if rule.above is not None:
        text += f" > {rule.above:g}"
    elif rule.minimum is not None:
        text += f" ≥ {rule.minimum:g}"
    if rule.maximum is not None and rule.maximum < 10**6:
        text += f", ≤ {rule.maximum:g}"
    return text


def _refused(name: str, backends: list[Capabilities]) -> list[nodes.Node]:
    """Return one paragraph for each backend that refuses the setting, or one of its values, always or sometimes."""
    found = []
    for each in backends:
        words = [_value(key) for key in each.refuses if field_of(key) == name]
        words += [
            f"{_value(key)} {one.when}".strip()
            for key, several in each.conditions.items()
            if field_of(key) == name
            for one in several
        ]
        if words:
            text = each.backend + (f" ({'; '.join(words)})" if any(words) else "")
            found.append(nodes.paragraph("", "", *tables.inline(text)))
    return found


def _value(key: str) -> str:
    value = key.partition("=")[2]
    return f"`{value}`" if value else ""


class BackendsTable(SphinxDirective):
    """Draw the registry of backends: class, purpose, installation, and what each cannot do whatever the settings."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        head = ("backend", "class", "what it does", "installed by", "cannot do")
        return [tables.table(head, map(_backend, all_capabilities()), "backends-table")]


def _backend(each: Capabilities) -> tuple[tables.Cell, ...]:
    refused = [name for name in NO_SETTINGS if name in each.refuses]
    refused += [f"{name} {one.when}" for name in NO_SETTINGS for one in each.conditions.get(name, ())]
    install = each.install.partition("' (")
    command = install[0].strip("'") if install[1] else each.install
    return f"`{each.backend}`", f"`{_trainer(each.backend)}`", each.summary, f"`{command}`", ", ".join(refused)


def _trainer(backend: str) -> str:
    classes = [getattr(distributed, name) for name in distributed.__all__ if name.endswith("Trainer")]
    return next((each.__name__ for each in classes if each._backend == backend), "Trainer")


class ExitCodes(SphinxDirective):
    """Draw the exit codes of every command, with the errors that cause them."""

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        return [tables.table(("exit code", "error", "meaning"), _exit_codes(), "exit-codes")]


def _exit_codes() -> Iterator[tuple[tables.Cell, ...]]:
    yield (
        "`0`",
        "",
        "The command succeeded. A run that was stopped by a callback or by early stopping counts as finished.",
    )
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__]
    wrong = [
        each for each in classes if issubclass(each, errors.DistributedError) and each is not errors.DistributedError
    ]
    for each in sorted(wrong, key=lambda each: each.exit_code):
        yield f"`{each.exit_code}`", f"`{each.__name__}`", " ".join((each.__doc__ or "").split())
    for number, text in {
        signal.SIGINT: "The command was interrupted. A run has saved its state.",
        signal.SIGTERM: "The run was asked to end, by SIGTERM or before a time limit, and has saved its state.",
    }.items():
        yield f"`{errors.TrainingInterrupted(number).code}`", f"`{errors.TrainingInterrupted.__name__}`", text


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    for name, directive in {
        "settings-table": SettingsTable,
        "backends-table": BackendsTable,
        "exit-codes": ExitCodes,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
