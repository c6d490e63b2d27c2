"""Start the console script `distributed`, after a check that the installed package `distributed` is that of distributed-trainer.

Dask's project `distributed` on PyPI installs a package of the same name. Its files overwrite those of distributed-trainer without
an error of pip. This module has another name, so it runs whichever of the two packages is installed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

PROBLEM_AND_FIX = (
    "Dask's package 'distributed' and distributed-trainer cannot share an environment (one overwrites the other):"
    " create a new environment (python -m venv NEW) and install only distributed-trainer there"
)


def main() -> None:
    """Run the command line. If the package is not that of distributed-trainer, print the problem and exit with code 3."""
    if problem := clash():
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(3)
    importlib.import_module("distributed.cli.__main__").main()


def clash() -> str:
    """Return one line that names the problem of this environment and its fix, or "" if there is none."""
    try:
        version = importlib.metadata.version("distributed")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version:
        return f"{PROBLEM_AND_FIX} (found Dask's distributed {version})"
    package = importlib.import_module("distributed")
    if not getattr(package, "__distributed_trainer__", False):
        return f"{PROBLEM_AND_FIX} ({getattr(package, '__file__', '?')} does not belong to distributed-trainer)"
    return ""
