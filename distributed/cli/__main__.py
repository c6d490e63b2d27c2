"""Entry point of `distributed VERB ...`, which is the same as `python -m distributed.cli VERB ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from distributed.errors import ConfigError, DistributedError, nearest

# verb -> (module, name of its typer app or command function, description for `--help`)
VERBS = {
    "train": ("distributed.cli.train", "train", "run a script on one or many processes"),
    "tune": ("distributed.cli.tune", "tune", "run a script many times with different values and keep the best"),
    "backends": (
        "distributed.cli.backends",
        "backends",
        "list the backends and show which setting works on which backend",
    ),
    "parity": (
        "distributed.cli.parity",
        "parity",
        "run a script on every backend and compare the numbers",
    ),
    "report": ("distributed.cli.report", "report", "draw the curves of runs or of a sweep into one HTML file"),
    "checkpoint": ("distributed.cli.checkpoint", "app", "list, verify and export checkpoints"),
    "mlflow-sync": (
        "distributed.cli.mlflow_sync",
        "mlflow_sync",
        "send to MLflow the records that a run could not send",
    ),
    "doctor": ("distributed.cli.doctor", "doctor", "check what works on this machine and how to make the rest work"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit the process with code 0, 1, 2, 3, 130 or 143, as DESIGN defines them."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run(arguments)
    except DistributedError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises DistributedError for errors that the user can fix."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        sys.stdout.write(_version() + "\n")
        return 0
    verb = arguments[0]
    if verb not in VERBS:
        what = "a flag, not a command" if verb.startswith("-") else "not a command"
        raise ConfigError(f"{verb!r} is {what}{nearest(verb, VERBS)}: choose one of {', '.join(VERBS)}")
    module, name, _ = VERBS[verb]
    command = getattr(importlib.import_module(module), name)
    if verb in ("train", "tune"):  # these two commands parse their own flags
        return int(command(arguments[1:]))
    return _run_typer(command, verb, arguments[1:])


def _run_typer(command: Any, verb: str, arguments: Sequence[str]) -> int:
    """Parse and run a command of typer. Turn its usage errors into ConfigError with a message of one line."""
    import typer

    exceptions = _click_exceptions()
    app = command
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command()(command)
    program = f"distributed {verb}"
    try:
        code = app(args=list(arguments), prog_name=program, standalone_mode=False)
    except exceptions.NoSuchOption as error:
        hint = f" (did you mean {error.possibilities[0]}?)" if error.possibilities else ""
        raise ConfigError(f"{error.option_name} is not a flag of {verb}{hint}: see '{program} --help'") from None
    except exceptions.ClickException as error:
        raise ConfigError(f"{_one_line(error.format_message())}: see '{program} --help'") from None
    except typer.Abort:
        return 130
    return code if isinstance(code, int) else 0


def _click_exceptions() -> Any:
    """Return the exceptions of the click that typer uses: a vendored copy in newer versions of typer, the library in
    older ones."""
    try:
        return importlib.import_module("typer._click.exceptions")
    except ModuleNotFoundError:
        return importlib.import_module("click.exceptions")


def _one_line(message: str) -> str:
    return " ".join(message.split()).rstrip(".")


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, _, text) in VERBS.items()]
    return "\n".join(["usage: distributed VERB ...   ('distributed VERB --help' explains a command)", "", *lines, ""])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"distributed-trainer {version('distributed-trainer')}"
    except PackageNotFoundError:
        return "distributed-trainer (not installed, run from source)"


if __name__ == "__main__":
    main()
