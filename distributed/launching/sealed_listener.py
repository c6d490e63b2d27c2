"""Listen on a port of a launcher, and close connections that do not prove within seconds that they belong to this launch."""

from __future__ import annotations

import dataclasses
import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from distributed.launching.seal import Seal

HELLO = "hello"  # name of the seal for the first line of a connection
_LINE_BYTES = 4096
_LINE_S = 10.0  # time in which the first line of a connection must arrive
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_MOST_STRANGERS = 256  # limit of connections whose first line has not arrived yet


@dataclasses.dataclass
class _Stranger:
    deadline: float
    line: bytes = b""


class SealedListener:
    """Accept connections in the thread that runs `selector`.

    `admit` is called with each connection whose first line is sealed with `secret`, and with the message in that line. All other
    connections are closed and counted. `bound` is a socket that has an address already; by default, a new socket is created.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        secret: str,
        admit: Callable[[socket.socket, dict[str, Any]], None],
        bound: socket.socket | None = None,
    ) -> None:
        self._selector, self._secret, self._admit = selector, secret, admit
        self._family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.socket(self._family, socket.SOCK_STREAM) if bound is None else bound
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        self.num_refused = 0
        self._heard: set[bytes] = set()  # the HMACs of accepted first lines

    @property
    def port(self) -> int:
        """Port on which the launcher listens."""
        port: int = self._socket.getsockname()[1]
        return port

    def listen(self, address: str) -> None:
        """Listen on the interface that has `address`. A child process may call this for its parent, because they share the socket."""
        if self._family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            address = address if ":" in address else f"::ffff:{address}"
        self._socket.bind((address, 0))
        self._socket.listen(128)

    def open(self) -> None:
        """Begin to accept connections. Call `listen` first, unless the socket was bound before."""
        self._socket.listen(128)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)

    @property
    def patience_s(self) -> float | None:
        """Seconds until `send_late_away` has a connection to close, or None if no connection is waiting."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def send_late_away(self) -> None:
        """Close the connections whose first line did not arrive in time."""
        now = time.monotonic()
        for connection in [each for each, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._refuse(connection)

    def _accept(self, _: Any) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:
                self._refuse_oldest()
            return  # with any other error the peer closed the connection before it was accepted
        if len(self._strangers) >= _MOST_STRANGERS:
            self._refuse_oldest()
        connection.setblocking(False)
        self._strangers[connection] = _Stranger(time.monotonic() + _LINE_S)
        self._selector.register(connection, selectors.EVENT_READ, self._introduce)
        # Read now: a worker's line has arrived already, and later connections then cannot displace the worker.
        self._introduce(connection)

    def _introduce(self, connection: socket.socket) -> None:
        """Read more of the first line. A worker sends nothing else until it has received a command."""
        stranger = self._strangers.get(connection)
        if stranger is None:  # closed earlier in the same call of `select`
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
        if hello is None or proof in self._heard:  # lines contain a random name, so a repeated line is a replay
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
