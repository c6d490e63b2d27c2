"""The port of the launcher over Ray: who cannot prove within a few seconds that it belongs to this launch is sent away."""

from __future__ import annotations

import dataclasses
import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from distributed.backends._ray.seal import Seal

HELLO = "hello"  # the name of the seal of a first line
_LINE_BYTES = 4096
_LINE_S = 10.0  # for the first line
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_MOST_STRANGERS = 256  # connections that have not proved anything yet


@dataclasses.dataclass
class _Stranger:
    deadline: float
    line: bytes = b""


class Door:
    """Accepts connections in the thread of `selector`. `admit` gets each one whose first line is sealed with `secret`, and what
    that line says. The others are closed and counted."""

    def __init__(
        self, selector: selectors.BaseSelector, secret: str, admit: Callable[[socket.socket, dict[str, Any]], None]
    ) -> None:
        self._selector, self._secret, self._admit = selector, secret, admit
        self._family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listener = socket.socket(self._family, socket.SOCK_STREAM)
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self.num_refused = 0
        self._heard: set[bytes] = set()  # the proofs of the lines that were taken

    @property
    def port(self) -> int:
        """Where it listens. After `listen`."""
        port: int = self._listener.getsockname()[1]
        return port

    def listen(self, address: str) -> None:
        """Listen at this address of this machine alone. A child process may do it for its parent: they share the socket."""
        if self._family == socket.AF_INET6:
            self._listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            address = address if ":" in address else f"::ffff:{address}"
        self._listener.bind((address, 0))
        self._listener.listen(128)

    def open(self) -> None:
        """Accept connections from now on. After `listen`."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def patience_s(self) -> float | None:
        """Seconds until `send_late_away` has something to do; None where nobody is waited for."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def send_late_away(self) -> None:
        """Close the connections that took too long to say who they are."""
        now = time.monotonic()
        for connection in [each for each, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._refuse(connection)

    def _accept(self, _: Any) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._refuse_oldest()
            return  # any other error: the connection was closed before it was accepted
        if len(self._strangers) >= _MOST_STRANGERS:
            self._refuse_oldest()
        connection.setblocking(False)
        self._strangers[connection] = _Stranger(time.monotonic() + _LINE_S)
        self._selector.register(connection, selectors.EVENT_READ, self._introduce)
        self._introduce(connection)  # a worker has sent its line by now, and is not pushed out by those who have not

    def _introduce(self, connection: socket.socket) -> None:
        """Read on in the first line. A worker sends nothing after it before it has its order."""
        stranger = self._strangers.get(connection)
        if stranger is None:  # refused in this very round of the selector
            return
        try:
            data = connection.recv(_LINE_BYTES - len(stranger.line))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.line += data
        if b"\n" in stranger.line:
            self._judge(connection, stranger.line)
        elif not data or len(stranger.line) >= _LINE_BYTES:
            self._refuse(connection)

    def _judge(self, connection: socket.socket, line: bytes) -> None:
        hello, proof = Seal(self._secret, HELLO).open(line), line.partition(b" ")[0]
        if hello is None or proof in self._heard:  # a worker's line has a name that it drew: none comes twice
            self._refuse(connection)
            return
        self._heard.add(proof)
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.setblocking(True)
        self._admit(connection, hello)

    def _refuse_oldest(self) -> None:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._refuse(oldest)

    def _refuse(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        self._selector.unregister(connection)
        connection.close()
        self.num_refused += 1
