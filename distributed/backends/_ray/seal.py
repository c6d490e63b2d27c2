"""The lines that the Ray launcher and its workers exchange: an HMAC and JSON. The HMAC is checked before the JSON is parsed."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

LINE_BYTES = 1 << 20  # longer than any message of this package


class Seal:
    """Sign and check the messages of one direction of one connection. Both ends create it with the same secret and name.

    The HMAC covers the content, the name and the number of the line, so a line cannot be changed, moved or repeated. Nothing is
    encrypted.
    """

    def __init__(self, secret: str, name: str) -> None:
        self._key = hmac.digest(secret.encode(), name.encode(), hashlib.sha256)
        self._count = 0

    def close(self, message: Mapping[str, Any]) -> bytes:
        """Return the line that carries `message`, which is the next message."""
        content = json.dumps(message).encode()
        return self._next_proof(content) + b" " + content + b"\n"

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return the message in `line`, which is the next line. None if its HMAC is wrong or it is not a JSON object."""
        proof, _, content = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, self._next_proof(content)):
            return None
        try:
            message = json.loads(content)  # the sender knows the secret
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _next_proof(self, content: bytes) -> bytes:
        numbered = b"%d %b" % (self._count, content)
        self._count += 1
        return hmac.new(self._key, numbered, hashlib.sha256).hexdigest().encode()
