"""The secret that the nodes of a run share, and what is signed with it."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError, ResourceError

VARIABLE = "DISTRIBUTED_TOKEN"
_this: dict[str, str] = {}  # "attempt": what `bind` was given
_SHORTEST = 16  # characters: what is shorter can be guessed


def shared_secret() -> bytes | None:
    """Return the secret in DISTRIBUTED_TOKEN, or None where there is none. ConfigError where it can be guessed."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < _SHORTEST:
        raise ConfigError(
            f"{VARIABLE} has {len(text)} characters, and a secret needs at least {_SHORTEST}: make one with"
            " python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()


def read_token_file(path: str) -> None:
    """Put the secret that stands in the file `path` into DISTRIBUTED_TOKEN, for this process and those it starts.

    Raises ConfigError where the file cannot be read, is empty, or is open to other users.
    """
    try:
        mode, text = Path(path).stat().st_mode, Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {path!r} cannot be read ({error}): name a file that holds one secret"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--token-file {path!r} is open to other users: chmod 600 {path}")
    if not text:
        raise ConfigError(f"--token-file {path!r} is empty: write the secret of all nodes into it")
    os.environ[VARIABLE] = text
    shared_secret()


def signature(secret: bytes, key: str, value: bytes) -> bytes:
    """Return the HMAC-SHA256 of `value` under the name `key`, as hexadecimal digits."""
    return hmac.digest(secret, key.encode() + b"\0" + value, hashlib.sha256).hex().encode()


def bind(attempt: str) -> None:
    """Make what `messages` signs in this process from now on valid in `attempt` alone: what others signed in an earlier one with
    the same secret is refused. Every rank must name the same attempt, which nobody could know before."""
    _this["attempt"] = attempt


def messages(store: Any, prefix: str) -> Any:
    """Return the part `prefix` of a torch.distributed store, for what this package writes there: signed where there is a
    secret. It has `set`, `get`, `check` and `compare_set`."""
    import torch.distributed as dist

    secret = shared_secret()
    return (
        dist.PrefixStore(prefix, store)
        if secret is None
        else SignedStore(store, secret, f"{prefix}/", _this.get("attempt", ""))
    )


class SignedStore:
    """A store of torch.distributed whose values are signed. Everything that reads it is told of a value that is not.

    It has the verbs that this package uses, so it is no Store for torch's own process groups.
    """

    def __init__(self, store: Any, secret: bytes, prefix: str, attempt: str = "") -> None:
        self._store, self._secret, self._prefix, self._attempt = store, secret, prefix, attempt

    def set(self, key: str, value: str | bytes) -> None:
        """Write `value` and its signature."""
        self._store.set(self._prefix + key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Wait for `key` and return its value. Raises ResourceError where it is not signed with the secret."""
        return self._checked(key, self._store.get(self._prefix + key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` are there, signed or not."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` where the value is `expected` ("": where there is none); return the value that is there then."""
        before = self._signed(key, expected) if expected else b""
        found = self._store.compare_set(self._prefix + key, before.decode(), self._signed(key, desired).decode())
        return self._checked(key, found)

    def _signed(self, key: str, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        return self._signature(key, data) + data

    def _signature(self, key: str, data: bytes) -> bytes:
        return signature(self._secret, f"{self._attempt}/{self._prefix}{key}", data)

    def _checked(self, key: str, content: bytes) -> bytes:
        found, value = content[:64], content[64:]
        if not hmac.compare_digest(found, self._signature(key, value)):
            raise ResourceError(
                f"{self._prefix + key} in the store of this run is not signed with the secret of this node: give all nodes"
                f" the same {VARIABLE}; where they have it, another program has written into the store"
            )
        return value
