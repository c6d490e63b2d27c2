"""Find a script's use of Keras in its source, before the script runs."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed.errors import ConfigError

_ENGINES = ("tensorflow", "torch", "jax", "numpy", "openvino")  # engines of Keras 3, named as their libraries
_DEFAULT_ENGINE = "tensorflow"
_MOST_FILES = 50


def keras_engine(environ: Mapping[str, str]) -> str | None:
    """Return the Keras engine that `environ`, the environment of a backend's workers, selects, or None if it selects none."""
    return environ.get("KERAS_BACKEND")


def check_keras_backend(script: Path, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if KERAS_BACKEND names an engine that is not installed and the script imports keras.

    Args:
        script: the script that the workers run.
        environ: the variables of the backend's workers. Their engine is named in the message.
    """
    chosen = os.environ.get("KERAS_BACKEND")
    if not chosen or (chosen in _ENGINES and importlib.util.find_spec(chosen) is not None):
        return
    if any(name.partition(".")[0] == "keras" for names in imported(script) for name in names):
        what = "is not installed" if chosen in _ENGINES else f"is none of {', '.join(_ENGINES)}"
        wanted = keras_engine(environ)
        fix = "unset it" if wanted is None else f"set KERAS_BACKEND={wanted}"
        raise ConfigError(f"KERAS_BACKEND={chosen!r} {what}, and {script} imports keras: {fix}")


def environ_for(script: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ`, the environment of a backend's workers, adapted to `script`.

    A script that does not import this package uses no Trainer. Its engine of Keras is then left to the script or to
    Keras.
    """
    chosen = dict(environ)
    is_ours = any(name.partition(".")[0] == "distributed" for names in imported(script) for name in names)
    if not is_ours and chosen.get("KERAS_BACKEND") != _DEFAULT_ENGINE:
        chosen.pop("KERAS_BACKEND", None)
    return chosen


def imported(script: Path) -> Iterator[set[str]]:
    """Yield the names that the script imports, then those that each imported file beside it imports. Files that cannot
    be read or parsed are skipped."""
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
    """Yield the imported modules, the names imported from modules, and "torch.nn" if the code uses that attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "nn" and getattr(node.value, "id", None) == "torch":
            yield "torch.nn"
