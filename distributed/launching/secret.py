"""The secret that the processes of a run share, and the signatures made with it."""

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
_bound: dict[str, str] = {}  # the key "attempt" has the argument of `bind`
_SHORTEST = 16  # in characters; a shorter secret can be guessed


def shared_secret() -> bytes | None:
    """Return the secret in DISTRIBUTED_TOKEN, or None if it is not set. Raises ConfigError if it is too short."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < _SHORTEST:
        raise ConfigError(
            f"{VARIABLE} has {len(text)} characters, but a secret needs at least {_SHORTEST}: create one with"
            " python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()


def read_token_file(path: str) -> None:
    """Read a secret from the file `path` and set DISTRIBUTED_TOKEN to it, for this process and the processes it starts.

    Raises ConfigError if the file cannot be read, is empty, or has permissions for other users.
    """
    try:
        mode, text = Path(path).stat().st_mode, Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file {path!r} cannot be read ({error}): name a file that contains one secret"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--token-file {path!r} is open to other users: chmod 600 {path}")
    if not text:
        raise ConfigError(f"--token-file {path!r} is empty: write the secret that all nodes share into it")
    os.environ[VARIABLE] = text
    shared_secret()


def signature(secret: bytes, key: str, value: bytes) -> bytes:
    """Return the HMAC-SHA256 of `key` and `value` as 64 hexadecimal digits."""
    return hmac.digest(secret, key.encode() + b"\0" + value, hashlib.sha256).hex().encode()


def bind(attempt: str) -> None:
    """Bind the signatures of `messages` in this process to `attempt`.

    From now on, messages that were signed in an earlier attempt with the same secret are refused. Every rank must pass the
    same `attempt`, and it must not be predictable.
    """
    _bound["attempt"] = attempt


def messages(store: Any, prefix: str) -> Any:
    """Return a view of the torch.distributed store `store` whose keys begin with `prefix`, for the messages of this package.

    Values are signed if a secret is set. The view has `set`, `get`, `multi_get`, `check` and `compare_set`.
    """
    import torch.distributed as dist

    secret = shared_secret()
    return (
        dist.PrefixStore(prefix, store)
        if secret is None
        else SignedStore(store, secret, f"{prefix}/", _bound.get("attempt", ""))
    )


class SignedStore:
    """A view of a torch.distributed store that signs the values it writes and checks the values it reads.

    This class has only the five methods of a store that this package uses. Torch's own process groups cannot use it.
    """

    def __init__(self, store: Any, secret: bytes, prefix: str, attempt: str = "") -> None:
        self._store, self._secret, self._prefix, self._attempt = store, secret, prefix, attempt

    def set(self, key: str, value: str | bytes) -> None:
        """Write `value` with its signature."""
        self._store.set(self._prefix + key, self._signed(key, value))

    def get(self, key: str) -> bytes:
        """Wait for `key` and return its value. Raises ResourceError if the value is not signed with the secret."""
        return self._checked(key, self._store.get(self._prefix + key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all `keys` and return their values, as `get` does."""
        found = self._store.multi_get([self._prefix + key for key in keys])
        return [self._checked(key, content) for key, content in zip(keys, found, strict=True)]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` exist. Does not check signatures."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value equals `expected`, or if there is none and `expected` is "". Return the value after that."""
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
                f"the value of {self._prefix + key} in the store of this run is not signed with the secret of this node: set the"
                f" same {VARIABLE} on all nodes; if they have the same, another program has written to the store"
            )
        return value
