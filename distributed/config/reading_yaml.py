"""Read YAML without two of its traps: equal names in a mapping, of which it keeps the last, and 1:4, which it reads as 64."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError


def read_unique(path: str | os.PathLike[str], where: str, wanted: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of each top-level name and of each name in a group (as `group.name`).

    Args:
        path: the file.
        where: the name of the file in messages.
        wanted: what to write instead of a text that is not YAML.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or has a name twice. The message has the line.
    """
    import yaml

    try:
        loader = yaml_loader()(Path(path).read_bytes())
        node = loader.get_single_node()
        lines = _lines(node, where)
        return None if node is None else loader.construct_document(node), lines
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}): name another") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "no text"
        raise ConfigError(f"{where}{line} is not YAML ({problem}): write {wanted}") from None


@functools.cache
def yaml_loader() -> Any:
    """Return yaml's SafeLoader without the numbers to the base of 60 of YAML 1.1, which read `num_nodes: 1:4` as 64."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Loader for which a number with a colon is a text."""

    def number(loader: Any, node: Any) -> Any:
        if ":" in node.value:
            return node.value
        return loader.construct_yaml_int(node) if node.tag.endswith(":int") else loader.construct_yaml_float(node)

    for tag in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{tag}", number)
    return Loader


def _lines(node: Any, where: str, prefix: str = "") -> dict[str, int]:
    """Return the line of each name in the mapping `node`. Raises ConfigError if a name occurs twice."""
    lines: dict[str, int] = {}
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        if key.id != "scalar":
            continue
        name, line = prefix + key.value, key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{where} has {key.value!r} in line {lines[name]} and again in line {line}: drop one")
        lines[name] = line
        if not prefix:
            lines.update(_lines(value, where, f"{name}."))
    return lines
