"""Start of the console script `distributed`: looks whether the package of that name is ours before anything imports it.

Dask's project is called `distributed` on PyPI and installs a package of the same name over ours; pip says nothing.
This module has a name of its own, so it runs whichever package won.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

CURE = (
    "Dask's package 'distributed' and distributed-trainer cannot share an environment (one overwrites the other):"
    " make a new one (python -m venv NEW) and install only distributed-trainer there"
)


def main() -> None:
    """Run the command line, or leave with exit code 3 and the cure."""
    if problem := clash():
        sys.stderr.write(f"error: {problem}\n")
        sys.exit(3)
    importlib.import_module("distributed.cli.__main__").main()


def clash() -> str:
    """What is wrong with this environment in one line, or ""."""
    try:
        version = importlib.metadata.version("distributed")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version:
        return f"{CURE} (found Dask's distributed {version})"
    package = importlib.import_module("distributed")
    if not getattr(package, "__distributed_trainer__", False):
        return f"{CURE} (the package at {getattr(package, '__file__', '?')} is not ours)"
    return ""
