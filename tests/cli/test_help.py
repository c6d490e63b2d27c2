"""The help of every command has one style, fits into 80 columns and has examples that the command understands."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import typer.main

from distributed.backends.exporting import FORMATS
from distributed.cli import __main__ as entry
from distributed.cli.__main__ import VERBS, run
from distributed.cli.examples import EXAMPLES
from distributed.cli.submit import SCHEDULERS
from distributed.cli.train import ALIAS_SWITCHES, ALIASES, make_parser, read_flags, read_overrides, train_parser
from distributed.cli.tune import _parser as tune_parser
from distributed.cli.typer_help import Command
from distributed.config.flags import SETTINGS
from distributed.config.registry import REGISTRY
from distributed.config.settings import DistributedConfig
from distributed.tuning.plan import SCHEDULERS as TRIAL_SCHEDULERS
from distributed.tuning.proposals import SEARCH_ALGORITHMS

OWN = ("train", "tune", "submit")  # these parse their flags with argparse


def command_of(verb: str) -> Any:
    """The click command of a verb that uses typer."""
    module, name, _ = VERBS[verb]
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(cls=Command)(found)
        return typer.main.get_command(app)
    return typer.main.get_command(found)


def commands() -> list[str]:
    """The words of every command, found from the program itself."""
    below = {verb: [*getattr(command_of(verb), "commands", {})] for verb in VERBS if verb not in OWN}
    below["submit"] = [*SCHEDULERS]
    return ["", *VERBS, *(f"{verb} {word}" for verb, words in below.items() for word in words)]


def help_of(words: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        assert run([*words.split(), "--help"]) == 0
    return shown.getvalue()


def test_every_command_has_examples_and_no_others_have():
    assert sorted(EXAMPLES) == sorted(commands())


@pytest.mark.parametrize("words", commands())
def test_the_help_has_one_style(words):
    text = help_of(words)
    lines = text.splitlines()

    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert lines[0].startswith(f"usage: distributed {words}".rstrip() + " ")
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert len(titles) == len(set(titles)) >= 2 and titles[-1] == "Examples", titles
    assert not re.search(r"[│╭╰]|Usage|Options|<\w+>", text)
    assert all(line == line.rstrip() for line in lines) and "\n\n\n" not in text
    flags = [line for line in lines if re.match(r"  --\w", line) and len(line.split("  ")) > 2]
    assert all(re.match(r"  --\S+.{0,31}?  +\S", line) for line in flags)
    assert words in ("", "submit", "checkpoint") or "  --help" in text


LINES = [pytest.param(words, line, id=line[:60]) for words, lines in EXAMPLES.items() for line in lines]


@pytest.mark.parametrize(("words", "line"), LINES)
def test_an_example_parses(words, line):
    program, *arguments = shlex.split(line.replace("\\\n", " "))
    assert program == "distributed" and arguments[: len(words.split())] == words.split()
    parse(arguments[0], arguments[1:])


def parse(verb: str, arguments: list[str]) -> None:
    """Parse a command line as its command does. Raises for an unknown flag, a missing argument or a value that is refused."""
    if verb == "submit" and arguments[0] in ("status", "logs", "stop"):
        assert len(arguments) == 2
    elif verb in OWN:
        if verb == "submit":
            scheduler = SCHEDULERS[arguments.pop(0)]
            parser = make_parser("distributed submit")
            scheduler.add_flags(parser.add_argument_group("own"))
        else:
            parser = train_parser() if verb == "train" else tune_parser()
        flags, _ = read_flags(parser, arguments)
        assert flags["script"] or flags["config"]
        settings = [*SETTINGS, *ALIASES, *ALIAS_SWITCHES]
        if verb == "tune":
            settings.remove("scheduler")  # a scheduler of trials here
            assert flags["search"] in SEARCH_ALGORITHMS and flags["scheduler"] in (None, "none", *TRIAL_SCHEDULERS)
        check_values({name: flags[name] for name in settings if flags.get(name) is not None}, flags["set"])
    else:
        command = command_of(verb)
        with command.make_context(verb, list(arguments)) as context:
            check_values({}, context.params.get("settings") or ())
            assert {*(context.params.get("backends") or "all").split(",")} <= {"all", *REGISTRY}
            assert context.params.get("format_") in (None, *FORMATS)
            if below := getattr(command, "commands", None):
                name, *rest = [*context._protected_args, *context.args]
                below[name].make_context(name, rest).close()


def check_values(flags: dict[str, Any], assignments: Sequence[str]) -> None:
    """Check values of settings as text, each by itself and all together."""
    ranks = {name: int(flags.pop(name)) for name in ("world_size", "rank") if name in flags}
    assert all(number >= 0 for number in ranks.values())
    DistributedConfig(**read_overrides(None, flags, assignments, None, ()).flag)


@pytest.mark.parametrize("line", ["runs --wher x", "checkpoint list", "train --scrip x", "submit slurm --tim 3"])
def test_the_parsing_of_these_tests_can_fail(line):
    verb, *arguments = line.split()
    with pytest.raises(Exception, match=r"(?i)no such option|missing|is not a flag"):
        parse(verb, arguments)


def test_a_python_without_the_required_packages_is_named_with_the_cure(monkeypatch: Any, capsys: Any) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'typer'", name="typer")

    monkeypatch.setattr(entry.importlib, "import_module", fail)
    with pytest.raises(SystemExit) as end:
        entry.main(["runs"])
    said = capsys.readouterr().err
    assert end.value.code == 3 and said.count("\n") == 1
    assert f"{sys.executable} has no module 'typer'" in said and "activate the environment" in said


def test_the_required_modules_are_those_of_the_required_packages() -> None:
    wanted = importlib.metadata.requires("distributed-trainer") or []
    packages = {re.split(r"[<>=; ]", each)[0].lower() for each in wanted if "extra ==" not in each}
    assert {{"pyyaml": "yaml"}.get(name, name) for name in packages} == entry._REQUIRED
