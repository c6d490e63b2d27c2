"""Read YAML files whose names must be unique: of two equal names in a mapping, YAML itself silently keeps the last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError


def read_unique(path: str | os.PathLike[str], where: str) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML file, and the line of each name at the top and in its mappings (as `group.name`).

    `where` names the file in messages. Raises ConfigError if the file cannot be read or has a name twice, and yaml.YAMLError if
    it is not YAML.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}): name another") from None
    node = loader.get_single_node()
    lines = _lines(node, where)
    return None if node is None else loader.construct_document(node), lines


def _lines(node: Any, where: str, prefix: str = "") -> dict[str, int]:
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
