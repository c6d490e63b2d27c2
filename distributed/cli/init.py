"""`distributed init`: write a `train.py` and a `config.yaml` to begin with. They are the files of `examples/projects`."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from distributed.config.libraries import is_installed
from distributed.errors import ConfigError, nearest

# kind -> libraries that its script imports, and how to install them
KINDS = {
    "image": ({"torch": "torch", "PIL": "pillow", "sklearn": "scikit-learn"}, "images in a folder, with augmentation"),
    "text": ({"torch": "torch", "transformers": "transformers"}, "a small GPT-2 of transformers, on a text"),
    "tabular": ({"torch": "torch", "sklearn": "scikit-learn"}, "rows of numbers"),
    "keras": ({"torch": "torch", "keras": "keras", "sklearn": "scikit-learn"}, "a Keras model"),
}
FILES = ("train.py", "config.yaml")


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="where to write; it is created if need be")
    ] = Path(),
    kind: Annotated[
        str,
        typer.Option(
            metavar="|".join(KINDS), help="what is trained: " + "; ".join(f"{k}: {v[1]}" for k, v in KINDS.items())
        ),
    ] = "image",
) -> None:
    """Write train.py and config.yaml into a directory. They run as they are, on data that is on this machine.

    No file is ever overwritten.
    """
    if kind not in KINDS:
        raise ConfigError(f"--kind {kind} is unknown{nearest(kind, KINDS)}: choose one of {', '.join(KINDS)}")
    write_project(kind, directory)
    script = directory / FILES[0]
    missing = [name for module, name in KINDS[kind][0].items() if not is_installed(module)]
    if missing:
        print(f"not installed here: {', '.join(missing)}: run pip install {' '.join(missing)}")
    print(f"wrote {script} and {directory / FILES[1]}: change both as you like")
    print(f"to train on two processes: distributed train --script {shlex.quote(str(script))} --nproc-per-node 2")


def write_project(kind: str, directory: Path) -> None:
    """Write the files of `kind` into `directory`. Raises ConfigError if one of them exists or cannot be written."""
    for name in FILES:
        if os.path.lexists(directory / name):
            raise ConfigError(f"{str(directory / name)!r} exists and is not overwritten: name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            with open(directory / name, "x", encoding="utf-8") as file:  # "x" writes no file that has just appeared
                file.write((_projects() / kind / name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{str(directory)!r} cannot be written ({error.strerror}): name another directory") from None


def _projects() -> Path:
    """Return the directory with the projects: in an installed package beside this file, in a checkout in `examples`."""
    installed = Path(__file__).with_name("projects")
    return installed if installed.is_dir() else Path(__file__).parents[2] / "examples" / "projects"
