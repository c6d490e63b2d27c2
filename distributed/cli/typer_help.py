"""Commands and command groups of typer whose help has the style of all commands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from distributed.cli.examples import examples_text
from distributed.cli.help import Rows, paragraphs, sections_text


class Command(TyperCommand):
    """A command of typer whose help has the style of all commands.

    A parameter called `arguments` gets exactly the words after `--`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` into `ctx.params`."""
        if not any(param.name == "arguments" for param in self.params):
            return super().parse_args(ctx, args)
        cut = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:cut])
        if more := ctx.params["arguments"]:
            ctx.fail(f"{more[0]!r} is one word too many; arguments of the script follow after --")
        ctx.params["arguments"] = args[cut + 1 :]
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help into `formatter`."""
        formatter.write(_help_text(self, ctx, "[flags]" if len(self.params) else "", []))


class Group(TyperGroup):
    """A command of typer with commands of its own."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help into `formatter`."""
        rows = [(name, _first_sentence(command.help)) for name, command in self.commands.items()]
        formatter.write(_help_text(self, ctx, "COMMAND ...", [("Commands", rows)]))


def _help_text(command: Any, ctx: Any, rest: str, more: Iterable[tuple[str, Rows]]) -> str:
    params = command.get_params(ctx)
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = [param for param in params if param.param_type_name != "argument"]
    needed = [_written(param) for param in options if param.required]
    usage = " ".join(["usage:", ctx.command_path, *needed, rest, *map(_argument, arguments)])
    flags: dict[str, list[tuple[str, str]]] = {}
    for param in options:
        flags.setdefault(getattr(param, "rich_help_panel", None) or "Flags", []).append((_written(param), _text(param)))
    flags["Flags"] = flags.pop("Flags", [])  # the common ones are last, with --help
    rows = [(_argument(param).strip("[]"), _text(param)) for param in arguments]
    sections = sections_text([("Arguments", rows), *more, *flags.items()])
    words = ctx.command_path.split()[1:]
    return "\n".join([usage, "", paragraphs(command.help or ""), "", sections, examples_text(" ".join(words))])


def _argument(param: Any) -> str:
    name: str = param.metavar or param.name.upper()
    return name if param.required or name.startswith("[") else f"[{name}]"


def _written(param: Any) -> str:
    flags = ", ".join([*param.opts, *param.secondary_opts])
    return flags if param.is_flag else f"{flags} {param.metavar or param.name.upper()}"


def _text(param: Any) -> str:
    text: str = "show this help and exit" if param.name == "help" else param.help or ""
    if param.default is None or isinstance(param.default, bool) or param.required or "default:" in text or not text:
        return text
    return (
        f"{text} (default: {param.default:g})"
        if isinstance(param.default, float)
        else f"{text} (default: {param.default})"
    )


def _first_sentence(text: str | None) -> str:
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")
