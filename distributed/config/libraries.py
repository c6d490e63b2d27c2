"""Which libraries this environment has. Imports none of them."""

from __future__ import annotations

import importlib.util

from distributed.errors import ResourceError


def is_installed(name: str) -> bool:
    """Whether `import name` finds code. A folder of that name, as it may lie beside a script, is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


def check_not_hidden(name: str) -> None:
    """ResourceError where a file of the user is in the place of the library."""
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is not None and found.submodule_search_locations is None:
        raise ResourceError(f"{found.origin} hides the library {name}: rename that file")
