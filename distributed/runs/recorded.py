"""The settings that a run recorded in its config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.config.kinds import OBJECT, TEXT, check_kinds, optional
from distributed.config.reading import MAX_YAML_BYTES, parse_yaml, read_bytes
from distributed.errors import ConfigError

_KINDS = {"sources": optional(OBJECT), "hyperparameters": optional(OBJECT), "script": optional(TEXT)}


def read_recorded(path: Path) -> dict[str, Any]:
    """Return the content of the config.yaml `path`, or nothing if it is missing. Raises ConfigError if it cannot be read."""
    try:
        content = parse_yaml(read_bytes(path, MAX_YAML_BYTES))
        if content is None:
            return {}
        if not OBJECT.holds(content):
            raise ValueError(f"is not {OBJECT.words}")
        check_kinds(content, _KINDS)
        return dict(content)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it {error}"
        raise ConfigError(f"{str(path)!r} cannot be read ({why}): repair it, or remove it") from None
