"""Sign and check the lines that launchers exchange with each other and with Ray's workers. A line has an HMAC and a JSON object."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import select
import socket
from collections.abc import Mapping
from typing import Any

LINE_BYTES = 1 << 20  # limit of a line; every message of this package is shorter
_MOST_UNSENT = 4 * LINE_BYTES  # for a node that does not read; it counts as lost after some seconds


class Seal:
    """Sign and check the messages of one direction of one connection. Both ends create it with the same secret and name.

    The HMAC covers the content, the name and the number of the line, so a line cannot be changed, moved or repeated.
    Lines are not encrypted.
    """

    def __init__(self, secret: str, name: str) -> None:
        self._key = hmac.digest(secret.encode(), name.encode(), hashlib.sha256)
        self._count = 0

    def close(self, message: Mapping[str, Any]) -> bytes:
        """Return `message` as the next line of this connection."""
        content = json.dumps(message).encode()
        return self._next_proof(content) + b" " + content + b"\n"

    def open(self, line: bytes) -> dict[str, Any] | None:
        """Return the message in `line`, the next line of this connection, or None if its HMAC is wrong or it is not a
        JSON object."""
        proof, _, content = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(proof, self._next_proof(content)):
            return None
        try:
            message = json.loads(content)  # safe to parse, because the sender knows the secret
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _next_proof(self, content: bytes) -> bytes:
        numbered = b"%d %b" % (self._count, content)
        self._count += 1
        return hmac.new(self._key, numbered, hashlib.sha256).hexdigest().encode()


class SealedConnection:
    """A connection on which every line is sealed, with one seal per direction.

    Only one thread may read. Several threads may send, but only one at a time.
    """

    def __init__(self, connection: socket.socket, sends: Seal, reads: Seal) -> None:
        self.socket, self._sends, self._reads = connection, sends, reads
        self._rest = self._unsent = b""

    def send(self, **message: Any) -> None:
        """Send one message. Raises OSError if the connection is broken, or the other end has not read for long.

        On a socket that does not block, `flush` sends what the socket did not take.
        """
        if self.socket.gettimeout() == 0:
            if self.num_unsent > _MOST_UNSENT:
                raise BlockingIOError("the other end does not read")
            self._unsent += self._sends.close(message)
            self.flush()
        elif self.socket.send(line := self._sends.close(message)) != len(line):
            raise BlockingIOError("the other end does not read")

    def wait(self, seconds: float) -> bool:
        """Wait until something has arrived, or until the socket takes more of what is unsent. Return whether something has arrived.

        Wait at most `seconds`. Returns True also if the connection is broken.
        """
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | (select.POLLOUT if self.num_unsent else 0))
        return any(event & ~select.POLLOUT for _, event in poll.poll(1000 * seconds))

    @property
    def num_unsent(self) -> int:
        """Number of bytes that are left to `flush`."""
        return len(self._unsent)

    def flush(self) -> None:
        """Send as much as the socket takes without blocking. Raises OSError if the connection is broken."""
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived, in their order; an empty list if the newest one is incomplete.

        Raises OSError if the connection is broken, the other end has closed it, or a line is not sealed.
        """
        data = self.socket.recv(65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = [self._reads.open(line) for line in lines]
        if not data or None in messages or len(self._rest) > LINE_BYTES:
            raise ConnectionError("the connection is closed" if not data else "a line is not sealed with the secret")
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
