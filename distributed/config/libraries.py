"""Check which libraries are installed, without importing them."""

from __future__ import annotations

import importlib.util

from distributed.errors import ResourceError


def is_installed(name: str) -> bool:
    """Return whether the library `name` is installed: `import name` would find code.

    A plain folder of this name, for instance beside a script, does not count.
    """
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def check_not_hidden(name: str) -> None:
    """Raise ResourceError if a single file, such as a user's `ray.py`, would be imported in place of the library
    `name`."""
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None and found.submodule_search_locations is None:
        raise ResourceError(f"{found.origin} hides the library {name}: rename that file")
