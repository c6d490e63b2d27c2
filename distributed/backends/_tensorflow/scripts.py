"""What can be known of a user's script and objects before TensorFlow is imported, which takes seconds: that they are torch's."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from distributed.backends.base import Job
from distributed.errors import ConfigError

_FIX = "choose backend='pytorch-ddp' or another one of torch's, or make it a Keras model"
_MOST_FILES = 50


def refuse_torch(job: Job, words: str) -> None:
    """ConfigError for a model or optimizer of torch; `words` are the setting that wants others."""
    for name, value in (("model", job.model), ("optimizer", job.optimizer)):
        of_torch = [cls for cls in type(value).__mro__ if cls.__module__.startswith("torch.")]
        if any(cls.__name__ in ("Module", "Optimizer") for cls in of_torch):
            kind = type(value).__name__
            raise ConfigError(f"the {name} is torch's ({kind}), and {words} trains Keras models: {_FIX}")


def refuse_torch_script(script: Path) -> None:
    """ConfigError for a script that, with the files beside it that it imports, makes torch modules and knows no Keras."""
    is_of_torch = False
    for tree in _sources(script):
        names = set(_names(tree))
        if {name.partition(".")[0] for name in names} & {"keras", "tensorflow"}:
            return
        is_of_torch |= "torch.nn" in names
    if is_of_torch:
        raise ConfigError(
            f"{script} makes models of torch and imports neither keras nor tensorflow, and backend='tensorflow' trains Keras"
            f" models: {_FIX}"
        )


def _sources(script: Path) -> Iterator[ast.Module]:
    """The script and what it imports from beside it, as far as it can be read."""
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
        yield tree
        for name in _names(tree):
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
