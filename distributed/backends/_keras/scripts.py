"""What can be known of a script that may use Keras before it runs."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from distributed.errors import ConfigError

_ENGINES = ("tensorflow", "torch", "jax", "numpy", "openvino")  # Keras 3's, each named like its library
_DEFAULT_ENGINE = "tensorflow"
_MOST_FILES = 50


def check_keras_backend(script: Path, wanted: str) -> None:
    """ConfigError where KERAS_BACKEND names what is not here and the script imports keras, which would fail. `wanted`: the
    engine that the backend needs."""
    chosen = os.environ.get("KERAS_BACKEND")
    if not chosen or (chosen in _ENGINES and importlib.util.find_spec(chosen) is not None):
        return
    if any(name.partition(".")[0] == "keras" for names in imported(script) for name in names):
        what = "is not installed" if chosen in _ENGINES else f"is none of {', '.join(_ENGINES)}"
        raise ConfigError(f"KERAS_BACKEND={chosen!r} {what}, and {script} imports keras: set KERAS_BACKEND={wanted}")


def environ_for(script: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` of a backend's workers as `script` needs it: one that does not import this package has no Trainer, and Keras runs
    on the engine that it is written for, which the script or Keras itself chooses."""
    chosen = dict(environ)
    is_ours = any(name.partition(".")[0] == "distributed" for names in imported(script) for name in names)
    if not is_ours and chosen.get("KERAS_BACKEND") != _DEFAULT_ENGINE:
        chosen.pop("KERAS_BACKEND", None)
    return chosen


def imported(script: Path) -> Iterator[set[str]]:
    """What the script imports, and then each file beside it that is among that, as far as they can be read."""
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
            place = script.parent.joinpath(*name.split("."))
            waiting += [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]


def _names(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported, names that are imported from them, and torch.nn where it is used as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "nn" and getattr(node.value, "id", None) == "torch":
            yield "torch.nn"
