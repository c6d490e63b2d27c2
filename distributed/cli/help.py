"""The help of a command with many flags: grouped, every name whole, at 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_NAME_WIDTH = 34  # the longest: --[no-]activation-checkpointing


class GroupedHelp(TyperCommand):
    """A command whose `--help` lists its flags by `rich_help_panel`, in the order of declaration."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section per group; typer's own tables cut long names."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not getattr(parameter, "hidden", False):
                group = getattr(parameter, "rich_help_panel", None) or "Other"
                groups.setdefault(group, []).append((_name(parameter), getattr(parameter, "help", None) or ""))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(_NAME_WIDTH - 2), text) for name, text in rows], col_max=_NAME_WIDTH)


def _name(parameter: Any) -> str:
    """`--epochs N`, or `--[no-]shuffle`."""
    name: str = parameter.opts[0]
    if parameter.secondary_opts:
        return f"--[no-]{name[2:]}"
    if getattr(parameter, "is_flag", False) or not parameter.metavar:
        return name
    return f"{name} {parameter.metavar}"
