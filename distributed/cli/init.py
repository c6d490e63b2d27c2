"""`distributed init`: write a `train.py` and a `config.yaml` to begin with, or only the latter for a script that exists.

The files to begin with are those of `examples/projects`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from distributed.config.libraries import is_installed
from distributed.config.registry import default_backend
from distributed.errors import ConfigError, nearest

# kind -> libraries that its script imports, and how to install them
KINDS = {
    "image": ({"torch": "torch", "PIL": "pillow", "sklearn": "scikit-learn"}, "images in a folder, with augmentation"),
    "text": ({"torch": "torch", "transformers": "transformers"}, "a small GPT-2 of transformers, on a text"),
    "tabular": ({"torch": "torch", "sklearn": "scikit-learn"}, "rows of numbers"),
    "keras": ({"torch": "torch", "keras": "keras", "sklearn": "scikit-learn"}, "a Keras model"),
}
FILES = ("train.py", "config.yaml")
# The config.yaml of a script that exists. Every setting is commented out, so that the file changes nothing yet.
FOR_SCRIPT = """\
# Settings of {script}. Remove the '# ' before a name to set it, and start the script with
#   {command}
# Settings in the code of the script override this file, and a flag overrides both. All settings and flags: distributed train --help

# Of any script
# nproc_per_node: 2         # processes on this machine
# backend: {backend}      # see: distributed backends
# max_restarts: 3           # restarts after a worker died
# seed: 0                   # of the generators of each process

# Of a script with a Trainer or a Session
# epochs: 10                # passes over the data
# global_batch_size: 64     # samples per update, on all processes together
# learning_rate: 1.0e-3
# mixed_precision: bf16     # faster on GPUs
# checkpoint_frequency: 1   # epochs from one checkpoint to the next
# keep_latest_k: 1          # number of newest checkpoints; the best one is kept too
# log_every_n_steps: 50
# tensorboard: true
"""
_USES_US = re.compile(r"\b(\w*Trainer|Session)\(")


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="the directory to write into; it is created if it does not exist")
    ] = Path(),
    kind: Annotated[
        str,
        typer.Option(
            metavar="|".join(KINDS), help="what is trained: " + "; ".join(f"{k}: {v[1]}" for k, v in KINDS.items())
        ),
    ] = "image",
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write only a config.yaml, for this script, beside it or into DIR"),
    ] = None,
) -> None:
    """Write train.py and config.yaml into a directory. They run as they are, on data that is on this machine.

    No file is ever overwritten.
    """
    if script is not None:
        _begin_with(script, script.parent if directory == Path() else directory)
        return
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind} is unknown{nearest(kind, KINDS)}: choose one of {', '.join(KINDS)}")
    write_project(kind, directory)
    script = directory / FILES[0]
    missing = [name for module, name in KINDS[kind][0].items() if not is_installed(module)]
    if missing:
        print(f"not installed here: {', '.join(missing)}: run pip install {' '.join(missing)}")
    print(f"wrote {script} and {directory / FILES[1]}: change both as you like")
    print(f"to train on two processes: distributed train --script {shlex.quote(str(script))} --nproc-per-node 2")


def _begin_with(script: Path, directory: Path) -> None:
    """Write a config.yaml for `script` into `directory`, and show how to start the script with it."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--script {str(script)!r} cannot be read ({reason}): name a Python script") from None
    config = directory / FILES[1]
    command = f"distributed train --script {shlex.quote(str(script))} --config {shlex.quote(str(config))}"
    _write(directory, {FILES[1]: FOR_SCRIPT.format(script=script.name, command=command, backend=default_backend(2))})
    print(f"wrote {config}: every setting in it is commented out")
    if not _USES_US.search(text):
        print(
            f"{script} makes no Trainer and no Session: it runs as under torchrun, and only the settings under 'Of any script' apply;"
            " docs/coming-from shows what a Trainer changes"
        )
    print(f"to train on two processes: {command} --nproc-per-node 2")


def write_project(kind: str, directory: Path) -> None:
    """Write the files of `kind` into `directory`. Raises ConfigError if one of them exists or cannot be written."""
    _write(directory, {name: (_projects() / kind / name).read_text(encoding="utf-8") for name in FILES})


def _write(directory: Path, texts: Mapping[str, str]) -> None:
    for name in texts:
        if os.path.lexists(directory / name):
            raise ConfigError(f"{str(directory / name)!r} exists and is not overwritten: name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with open(directory / name, "x", encoding="utf-8") as file:  # "x" writes no file that has just appeared
                file.write(text)
    except OSError as error:
        raise ConfigError(f"{str(directory)!r} cannot be written ({error.strerror}): name another directory") from None


def _projects() -> Path:
    """Return the directory with the projects: in an installed package beside this file, in a checkout in `examples`."""
    installed = Path(__file__).with_name("projects")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "examples" / "projects"
