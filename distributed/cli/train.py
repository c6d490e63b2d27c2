"""`distributed train`: run a script on one or many processes. Every flag is written out here, because a flag is public
API.

The command uses argparse. With typer, which makes a pydantic adapter for each option, its sixty options take 0.15 s of
processor time, which is 7 % of the time from the command to the first step.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from distributed.cli.examples import examples_text
from distributed.cli.help import HelpFormatter
from distributed.config.fields import Rule, check, rules
from distributed.config.flags import SETTINGS, as_flag, flag_of
from distributed.config.merging import Overrides, joined, read_config_file
from distributed.config.peers import answer_for, with_answer
from distributed.config.reading import parse_yaml
from distributed.config.settings import GROUPS, DistributedConfig, canonical, check_setting, group_options
from distributed.errors import ConfigError, nearest
from distributed.launching.secret import read_token_file

# Spellings of other tools. They are accepted but not shown in the help.
ALIASES = (
    "world_size", "rank", "nnodes", "rdzv_endpoint", "save_interval", "gradient_clip_norm", "bucket_size_mb", "bucket_cap_mb",
)  # fmt: skip
ALIAS_SWITCHES = (
    "no_nccl", "gradient_checkpointing", "use_gradient_checkpointing", "find_unused_parameters", "static_graph",
)  # fmt: skip

_METAVARS = {
    "master_addr": "HOST", "master_port": "PORT", "checkpoint_dir": "DIR", "tensorboard_dir": "DIR",
    "resume_from_checkpoint": "true|PATH", "init_from": "PATH", "mixed_precision": "no|fp16|bf16",
}  # fmt: skip
_RULES = rules(DistributedConfig)
_ABOUT = """\
Run a script on one or many processes.

A script that uses the Trainer gets these settings; any other script gets
the environment variables that torchrun sets."""


class _Parser(argparse.ArgumentParser):
    """Parser that raises ConfigError for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see '{self.prog} --help'")

    def format_help(self) -> str:
        """Return the help: the flags, the settings that have no flag, and the examples."""
        formatter = self._get_formatter()
        formatter.start_section("Settings without a flag: --set NAME=VALUE, in YAML and in code")
        for name, rule in _without_flag():
            choices = f"={_metavar(rule)}" if rule.choices else ""
            formatter.add_argument(argparse.Action([], name, metavar=f"{name}{choices}", help=_help(rule)))
        formatter.end_section()
        words = self.prog.split()[1:]
        return f"{super().format_help()}\n{formatter.format_help()}\n{examples_text(' '.join(words))}"


def train(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Arguments after `--` belong to the script. Raises DistributedError."""
    command, script_args = read_flags(train_parser(), arguments)
    own = {
        name: command.pop(name) for name in ("script", "config", "set", "run_dir", "resume", "dry_run", "token_file")
    }
    if own["token_file"] is not None:
        read_token_file(own["token_file"])
    flags = {name: value for name, value in command.items() if value is not None}
    world = {name: _world_number(name, flags.pop(name)) for name in ("world_size", "rank") if name in flags}
    overrides = read_overrides(own["config"], flags, own["set"], own["script"], script_args)
    from distributed.launcher.start import start

    words = without_flags(arguments[: len(arguments) - len(script_args)], ("--run-dir",), ("--resume", "--"))
    return start(overrides, run_dir=own["run_dir"], resume=own["resume"], dry_run=own["dry_run"], words=words, **world)


def without_flags(arguments: Sequence[str], with_value: Iterable[str], switches: Iterable[str] = ()) -> list[str]:
    """Return the words of a command line without these flags and their values."""
    kept: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, equals, _ = _dashed(word).partition("=")
        if name in with_value and not equals:
            waiting.pop(0)
        elif name not in (*with_value, *switches):
            kept.append(word)
    return kept


def _world_number(name: str, text: str) -> int:
    """Check the value of `--world-size` or `--rank`. These two are not settings: they give the number of processes and
    the rank of this process."""
    rule = _RULES["nproc_per_node" if name == "world_size" else "node_rank"]
    is_number = re.fullmatch(r"[+-]?\d+", text) is not None
    number: int = check(name, int(text) if is_number else text, rule, lambda name, value: f"{flag_of(name)} {value}")
    return number


def read_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parse the command line.

    Returns:
        `(flags, arguments)`: the flags by name, and the script's own arguments, which follow after `--`.

    Raises:
        ConfigError: a flag is unknown.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    parsed, unknown = parser.parse_known_args([_dashed(argument) for argument in arguments[:end]])
    if unknown:
        raise _unknown(unknown[0], parser)
    return vars(parsed), tuple(arguments[end + 1 :])


def train_parser() -> argparse.ArgumentParser:
    """Return the parser of `train`, with the flags that no other command has."""
    parser = make_parser()
    parser.add_argument_group("Several nodes").add_argument(
        "--token-file", metavar="FILE",
        help="a file that holds the secret for signing messages between nodes; it must be the same on all nodes and readable"
        " only by you (default: the variable DISTRIBUTED_TOKEN)",
    )  # fmt: skip
    return parser


def make_parser(
    prog: str = "distributed train", usage: str = "--script FILE", about: str = _ABOUT, without: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Return the parser of the flags that `train` and `tune` share, except for those of the settings `without`.

    Values stay text, because they are checked later, where settings of all sources are checked. A flag that is not on
    the command line is None.
    """
    parser = _Parser(
        prog=prog, usage=f"%(prog)s {usage} [flags] [-- ARGUMENTS]", description=about,
        formatter_class=_Help, allow_abbrev=False, add_help=False,
    )  # fmt: skip
    run = parser.add_argument_group("Run")
    run.add_argument(
        "--script", metavar="FILE", help="run FILE as __main__ in every worker; its arguments follow after --"
    )
    run.add_argument("--config", metavar="FILE", help="read settings from a YAML file; code and flags override them")
    run.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[],
        help="any other setting or backend option, such as data.presharded=true; may be repeated",
    )  # fmt: skip
    run.add_argument("--run-dir", metavar="DIR", help="directory for the run's files (default: runs/SCRIPT-TIME-ID)")
    run.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of --run-dir")
    run.add_argument("--dry-run", action="store_true", help="print settings, batch equation and launch plan, then exit")
    run.add_argument("--help", action="help", help="show this help and exit")
    sections = {
        title: parser.add_argument_group(title) for title in dict.fromkeys(_RULES[name].section for name in SETTINGS)
    }
    for name in SETTINGS:
        if name in without:
            continue
        _add(sections[_RULES[name].section], name, _RULES[name])
    for name in ALIASES:
        parser.add_argument(flag_of(name), help=argparse.SUPPRESS)
    for name in ALIAS_SWITCHES:
        parser.add_argument(flag_of(name), action="store_true", default=None, help=argparse.SUPPRESS)
    return parser


def _add(section: Any, name: str, rule: Rule) -> None:
    if rule.kinds == (bool,):
        section.add_argument(flag_of(name), action=_Switch, help=_help(rule))
        return
    bare = {"nargs": "?", "const": True} if bool in rule.kinds else {}  # the flag without a value means true
    section.add_argument(flag_of(name), metavar=_METAVARS.get(name) or _metavar(rule), help=_help(rule), **bare)


def _without_flag() -> Iterable[tuple[str, Rule]]:
    yield from ((name, rule) for name, rule in _RULES.items() if name not in (*SETTINGS, *GROUPS))
    for group in GROUPS:
        yield from ((f"{group}.{option}", rule) for option, rule in rules(group_options(group)).items())


class _Switch(argparse.BooleanOptionalAction):
    """Action for `--name` and `--no-name`, shown as `--[no-]name`. It also accepts `--name true` and `--name false`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nargs = "?"

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        is_on = not option_string.startswith("--no-")
        if values is not None and (values not in ("true", "false") or not is_on):
            raise ConfigError(f"{option_string} takes no value {values!r}: write {self.format_usage()}")
        setattr(namespace, self.dest, values == "true" if values else is_on)

    def format_usage(self) -> str:
        return f"--[no-]{self.option_strings[0][2:]}"


class _Help(HelpFormatter):
    """Help formatter that writes `--name` and `--no-name` as one."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.format_usage() if isinstance(action, _Switch) else super()._format_action_invocation(action)


def _metavar(rule: Rule) -> str:
    if rule.choices and len(rule.choices) < 4:
        return "|".join(map(str, rule.choices))
    return {int: "N", float: "NUMBER"}.get(rule.kinds[-1], "NAME")


def _help(rule: Rule) -> str:
    text, default = rule.help.replace("%", "%%"), rule.default
    if default is None or isinstance(default, bool) or "default:" in text:
        return text
    return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"


def _dashed(argument: str) -> str:
    """Return torchrun's `--nproc_per_node=2` as `--nproc-per-node=2`."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _unknown(argument: str, parser: argparse.ArgumentParser) -> ConfigError:
    if not argument.startswith("-"):
        return ConfigError(
            f"{argument!r} is not a flag: name the script with --script, its own arguments follow after --"
        )
    name, verb = argument.partition("=")[0], parser.prog.rpartition(" ")[2]
    if (setting := name.lstrip("-").replace("-", "_")) in _RULES:
        return ConfigError(f"{name} is not a flag of {verb}: write --set {setting}=VALUE")
    if answer := answer_for(setting, as_flag):
        refusal = with_answer(f"{name} is not a flag of {verb}", answer)
        return ConfigError(f"{refusal}; a script's own flags follow after --")
    # hidden aliases are not suggested
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings]
    return ConfigError(
        f"{name} is not a flag of {verb}{nearest(name, flags)}: see '{parser.prog} --help';"
        " a script's own flags follow after --"
    )


def read_overrides(
    config: str | None,
    flags: Mapping[str, Any],
    assignments: Iterable[str],
    script: str | None,
    script_args: tuple[str, ...],
) -> Overrides:
    """Return all settings and arguments of a command line, under their canonical names.

    Args:
        config: path of a YAML file, or None.
        flags: text of each flag by name.
        assignments: `KEY=VALUE` of each `--set`.
        script: path of the script, or None for the one that `config` names.
        script_args: arguments of the script.

    Raises:
        ConfigError: a setting is unknown or has a wrong value. It names the first one.
    """
    base = read_config_file(config) if config is not None else Overrides()
    values, notices = canonical({name: _value(name, text) for name, text in flags.items()})
    extra, more = canonical(dict(_assignment(text) for text in assignments), written=as_flag)
    for name, value in joined(values, extra).items():
        check_setting(name, value, _RULES[name], as_flag)
    merged_flags = joined(joined(base.flag, values), extra)
    is_same = script is None or script == base.script
    # The script in the file is relative to the current directory, where another file may have this name: show its path.
    which = [f"script {base.script}, from {config}"] if script is None and base.script is not None else []
    return dataclasses.replace(
        base, flag=merged_flags, notices=(*which, *base.notices, *notices, *more), script=script or base.script,
        script_args=script_args or (base.script_args if is_same else ()),
    )  # fmt: skip


def _value(name: str, text: Any) -> Any:
    """Return the text of a flag, converted to the type of its setting. Return the text itself if it cannot be
    converted; it is refused when the settings are checked."""
    rule = _RULES.get(name)
    if not isinstance(text, str):
        return text
    if rule is None or (bool in rule.kinds and text in ("true", "false")) or (rule.optional and text == "null"):
        return _yaml(name, text)
    for kind in (kind for kind in rule.kinds if kind in (int, float)):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {text!r} has no KEY=VALUE form: write --set data.presharded=true")
    return name.strip(), _yaml(name, value)


def _yaml(name: str, text: str) -> Any:
    try:
        return parse_yaml(text.encode(errors="replace"))
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not YAML: quote it, as in --set '{name}=\"text\"'") from None
