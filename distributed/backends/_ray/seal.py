"""Lines between the launcher over Ray and its workers: JSON behind an HMAC, which is checked before anything is parsed."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

LINE_BYTES = 1 << 20  # more than any message of ours has


class Seal:
    """One direction of one connection. Both ends make one with the same secret and name.

    The proof covers the content, the name and the place among the lines: no line can be changed, moved or repeated. It is no
    encryption.
    """

    def __init__(self, secret: str, name: str) -> None:
        self._key = hmac.digest(secret.encode(), name.encode(), hashlib.sha256)
        self._count = 0

    def close(self, message: Mapping[str, Any]) -> bytes:
        """The line for the next message."""
        content = json.dumps(message).encode()
        return self._next_proof(content) + b" " + content + b"\n"

    def open(self, line: bytes) -> dict[str, Any] | None:
        """The message of the next line; None where whoever wrote it does not know the secret, or it is no message of ours."""
        proof, _, content = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, self._next_proof(content)):
            return None
        try:
            message = json.loads(content)  # only who knows the secret comes this far
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _next_proof(self, content: bytes) -> bytes:
        numbered = b"%d %b" % (self._count, content)
        self._count += 1
        return hmac.new(self._key, numbered, hashlib.sha256).hexdigest().encode()
