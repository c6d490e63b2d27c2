"""Addresses of object storage: which ones are accepted, and which library each needs. Imports none of these libraries."""

from __future__ import annotations

import os
import re
from typing import Any

from distributed.config.libraries import is_installed
from distributed.errors import ConfigError, ResourceError, nearest

_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
_WANTED = "s3://BUCKET/PATH, gs://BUCKET/PATH, file:///PATH, or a directory"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//?)")
_SPECIAL = "*?[]#\\"  # patterns for the libraries, or the parts of a signed address, which holds a secret after '?'


def is_address(value: Any) -> bool:
    """Return whether `value` is an address such as `s3://bucket/path`, right or wrong, and not a path of this machine."""
    return isinstance(value, (str, os.PathLike)) and _SCHEME.match(os.fspath(value)) is not None


def scheme_of(address: str) -> str:
    """Return the scheme of an address that `check_address` returned."""
    return address.partition("://")[0]


def check_address(name: str, value: str | os.PathLike[str]) -> str:
    """Return the address without a slash at its end. Opens no connection.

    Args:
        name: the name of the setting, for error messages.
        value: the address. `is_address` must be true of it.

    Raises:
        ConfigError: the address has an unknown scheme, credentials, no bucket, or characters that are not allowed.
    """
    text = os.fspath(value)
    found = _SCHEME.match(text)
    assert found is not None
    scheme, rest = found[1].lower(), text[found.end() :]
    _refuse_credentials(name, text)
    if scheme not in _LIBRARIES:
        close = {"gcs": " (did you mean 'gs'?)"}.get(scheme) or nearest(scheme, _LIBRARIES)
        raise ConfigError(f"{name}={text!r} has the unknown scheme {scheme!r}{close}: give {_WANTED}")
    if found[2] == "/":
        raise ConfigError(f"{name}={text!r} has lost a slash, as pathlib.Path drops it: pass the address as a str")
    if special := next((character for character in text if character in _SPECIAL or character < " "), None):
        shown = text.partition(special)[0]
        raise ConfigError(f"{name}={shown!r}... contains {special!r}: use letters, digits, '-', '_', '.' and '/'")
    parts = rest.rstrip("/").split("/")
    if scheme == "file":
        is_right = parts[0] == "" and len(parts) > 1
    else:
        is_right = parts[0] != ""
    if not is_right or "" in parts[1:] or {".", ".."} & set(parts):
        raise ConfigError(f"{name}={text!r} is not an address: give {_WANTED}")
    return f"{scheme}://{'/'.join(parts)}"


def check_library(name: str, value: Any) -> None:
    """Raise ResourceError if `value` is an address and the library for it is not installed."""
    if not is_address(value):
        return
    needed = _LIBRARIES[scheme_of(check_address(name, value))]
    for library in ("fsspec", needed):
        if not is_installed(library):
            raise ResourceError(
                f"{name}={value!r} needs {library}, which is not installed: pip install 'distributed-trainer[cloud]'"
            )


def below(address: str, name: str) -> str:
    """Return the address of `name` below `address`."""
    return f"{address}/{name}"


def address_in(path: str | os.PathLike[str]) -> str | None:
    """Return the address that was given where a path is expected, or None. A Path has dropped one of its slashes."""
    text = os.fspath(path)
    if not is_address(text):
        return None
    scheme, _, rest = text.partition(":")
    return f"{scheme}://{rest if scheme.lower() == 'file' else rest.lstrip('/')}"


def refuse_address(path: str | os.PathLike[str], what: str) -> None:
    """Raise ConfigError if `path` is an address. `what` works on directories of this machine, such as "'distributed status'"."""
    if (address := address_in(path)) is not None:
        _refuse_credentials(what, address)
        shown = address.partition("?")[0]
        raise ConfigError(f"{what} works on directories of this machine, not on {shown!r}: name a directory")


def _refuse_credentials(name: str, address: str) -> None:
    """Raise ConfigError if `address` contains '@', after which URLs have their host. The message must not repeat the address.

    A secret may contain a slash, so '@' is refused everywhere.
    """
    if "@" in address:
        raise ConfigError(
            f"{name} has credentials in its address, or another '@': write an address without '@', and pass the credentials in the"
            " environment or in the files of the provider's own tools"
        )
