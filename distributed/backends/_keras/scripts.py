"""Find a script's use of Keras in its source, before the script runs."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed.errors import ConfigError

_ENGINES = ("tensorflow", "torch", "jax", "numpy", "openvino")  # engines of Keras 3; each has the name of its library
_DEFAULT_ENGINE = "tensorflow"
_MOST_FILES = 50


def check_keras_backend(script: Path, wanted: str) -> None:
    """Raise ConfigError if KERAS_BACKEND names an engine that is not installed and the script imports keras.

    Args:
        wanted: the engine that the backend needs, for the message.
    """
    chosen = os.environ.get("KERAS_BACKEND")
    if not chosen or (chosen in _ENGINES and importlib.util.find_spec(chosen) is not None):
        return
    if any(name.partition(".")[0] == "keras" for names in imported(script) for name in names):
        what = "is not installed" if chosen in _ENGINES else f"is none of {', '.join(_ENGINES)}"
        raise ConfigError(f"KERAS_BACKEND={chosen!r} {what}, and {script} imports keras: set KERAS_BACKEND={wanted}")


def environ_for(script: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` of a backend's workers, adapted to `script`.

    A script that does not import this package uses no Trainer. Its Keras runs on the engine that the script or Keras
    chooses.
    """
    chosen = dict(environ)
    is_ours = any(name.partition(".")[0] == "distributed" for names in imported(script) for name in names)
    if not is_ours and chosen.get("KERAS_BACKEND") != _DEFAULT_ENGINE:
        chosen.pop("KERAS_BACKEND", None)
    return chosen


def imported(script: Path) -> Iterator[set[str]]:
    """Yield the imported names of the script, then those of each imported file beside it, as far as the files can be
    read."""
    waiting, seen = [script], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        names = set(_names(tree))
        yield names
        for name in names:
            path = script.parent.joinpath(*name.split("."))
            waiting += [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield imported modules, names that are imported from modules, and "torch.nn" if it is used as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "nn" and getattr(node.value, "id", None) == "torch":
            yield "torch.nn"
