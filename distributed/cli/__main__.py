"""Entry point of `distributed COMMAND ...`, which is the same as `python -m distributed.cli COMMAND ...`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from distributed.errors import ConfigError, DistributedError, nearest
from distributed.runs.processes import leave

# Section of `--help` -> verb -> (module, name of its typer app or command function, description)
SECTIONS = {
    "Begin": {
        "init": ("distributed.cli.init", "init", "write a train.py and config.yaml that run as they are"),
        "doctor": ("distributed.cli.doctor", "doctor", "check what works on this machine, and how to install the rest"),
        "backends": ("distributed.cli.backends", "backends", "show which setting works on which backend"),
    },
    "Train": {
        "train": ("distributed.cli.train", "train", "run a script on one or many processes"),
        "tune": ("distributed.cli.tune", "tune", "run a script with many different values and keep the best"),
        "submit": ("distributed.cli.submit", "submit", "submit a run to SLURM, Kubernetes or Ray; follow or stop it"),
        "parity": ("distributed.cli.parity", "parity", "run a script on every backend and compare the numbers"),
    },
    "See what ran": {
        "runs": ("distributed.cli.runs", "runs", "list, filter, sort and delete runs"),
        "status": ("distributed.cli.runs", "status", "show the state of a run and follow it to its end"),
        "why": ("distributed.cli.why", "why", "say why a run failed, hangs or ended"),
        "compare": ("distributed.cli.compare", "compare", "show several runs side by side in the terminal"),
        "report": ("distributed.cli.report", "report", "draw the curves of runs or a sweep into an HTML file"),
        "checkpoint": ("distributed.cli.checkpoint", "app", "list, verify and export checkpoints"),
        "export": ("distributed.cli.export", "export", "write the model of a run in a format that other programs read"),
        "mlflow-sync": ("distributed.cli.mlflow_sync", "mlflow_sync", "send to MLflow what a run could not send"),
    },
}
VERBS = {verb: entry for verbs in SECTIONS.values() for verb, entry in verbs.items()}


# The modules of the packages that every installation of distributed has.
_REQUIRED = {"cloudpickle", "numpy", "yaml", "rich", "safetensors", "typer", "xxhash"}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit the process: with 0 after success, with the `exit_code` of a `DistributedError`, with
    130 after Ctrl-C and with 143 after SIGTERM."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = run(arguments)
    except DistributedError as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").partition(".")[0]) not in _REQUIRED:
            raise
        sys.stderr.write(
            f"error: {sys.executable} has no module {missing!r}, which distributed requires: activate the environment in which"
            " distributed is installed, such as '. .venv/bin/activate' after 'make demo'\n"
        )
        code = 3
    except KeyboardInterrupt:
        code = 130
    if argv is not None:
        sys.exit(code)
    leave(code)


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
    if verb in ("train", "tune", "submit"):  # these commands parse their own flags
        return int(command(arguments[1:]))
    return _run_typer(command, verb, arguments[1:])


def _run_typer(command: Any, verb: str, arguments: Sequence[str]) -> int:
    """Parse and run a command of typer. Turn its usage errors into ConfigError with a message of one line."""
    import typer

    exceptions = _click_exceptions()
    app = command
    if not isinstance(command, typer.Typer):
        from distributed.cli.typer_help import Command

        app = typer.Typer(add_completion=False)
        app.command(cls=Command)(command)
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
    """Return click's module of exceptions that typer uses: a vendored copy in newer versions of typer, the click
    library in older ones."""
    try:
        return importlib.import_module("typer._click.exceptions")
    except ModuleNotFoundError:
        return importlib.import_module("click.exceptions")


def _one_line(message: str) -> str:
    return " ".join(message.split()).rstrip(".")


def _usage() -> str:
    from distributed.cli.examples import examples_text
    from distributed.cli.help import sections_text

    sections = sections_text(
        (title, [(verb, text) for verb, (_, _, text) in verbs.items()]) for title, verbs in SECTIONS.items()
    )
    about = "Train on any number of processes. 'distributed COMMAND --help' says more."
    return "\n".join(["usage: distributed COMMAND ...", "", about, "", sections, examples_text("")])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"distributed-trainer {version('distributed-trainer')}"
    except PackageNotFoundError:
        return "distributed-trainer (not installed, run from source)"


if __name__ == "__main__":
    main()
