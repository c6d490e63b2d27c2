"""Where the launcher and the workers that Ray placed meet: TCP, as it works the same on one machine and on many.

A Ray worker opens four connections: one for orders, and three that become its process' stdout, stderr and control pipe.
Each begins with one line that carries the token of this launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from distributed.launching.guarded import Guarded
from distributed.launching.output import WorkerOutput
from distributed.launching.processes import STOP_SIGNALS
from distributed.launching.stopping import Signals, Stop

STREAMS = ("stdout", "stderr", "control")
_KINDS = ("orders", *STREAMS)
_FIRST_LINE_BYTES = 4096


@dataclasses.dataclass
class Guest:
    """One Ray worker of this attempt, as it introduced itself."""

    sockets: dict[str, socket.socket] = dataclasses.field(default_factory=dict)
    hello: dict[str, Any] = dataclasses.field(default_factory=dict)
    rest: bytes = b""
    has_ended: bool = False

    def send(self, **order: Any) -> None:
        """Give it an order; one that has gone, or is not all here yet, gets none."""
        with contextlib.suppress(OSError, KeyError):
            self.sockets["orders"].sendall(json.dumps(order).encode() + b"\n")


class Hub:
    """One thread that meets the workers, hears of their ends and passes signals on.

    `tell` gets a stop and the end of a worker; `on_complete` all workers of an
    attempt by rank, once they have come; `note` a stop, too, and how Ray's process ended.
    """

    def __init__(
        self,
        world_size: int,
        signals: Signals,
        stop: Stop,
        tell: Callable[..., None],
        on_complete: Callable[[dict[int, Guest]], None],
        note: Callable[..., None],
    ) -> None:
        self._world_size, self._signals, self._stop = world_size, signals, stop
        self._tell, self._on_complete, self._note = tell, on_complete, note
        self._lock = threading.RLock()
        self._guests: dict[str, Guest] = {}
        self._present: dict[int, Guest] = {}  # of a complete attempt, by rank
        self._is_over = False  # whoever Ray still sends is turned away
        self.token = secrets.token_hex(16)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(("", 0), backlog=128, family=family, dualstack_ipv6=both)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(signals, selectors.EVENT_READ, self._note_signals)
        self._thread = threading.Thread(target=self._serve, name="workers of Ray", daemon=True)

    def start(self, ray: Guarded) -> None:
        """Start listening to workers, signals and Ray's process."""
        self._selector.register(ray.reports, selectors.EVENT_READ, lambda _: self._hear_ray(ray))
        self._thread.start()

    def order(self, **order: Any) -> None:
        """Give every worker of this attempt an order."""
        with self._lock:
            for guest in self._present.values():
                guest.send(**order)

    def dismiss(self, *, restart: bool) -> None:
        """This attempt is over: its workers end, and Ray starts them again or not. Those that come next are new ones, and
        without `restart` they are not let in: Ray may start workers again that it saw die, whatever is said here."""
        with self._lock:
            self.order(op="end", restart=restart)
            self._present = {}
            if not restart:
                self._is_over = True
                for guest in self._guests.values():
                    guest.send(op="end", restart=False)

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    with self._lock:
                        key.data(key.fileobj)
                if self._stop.is_due():
                    self.order(op="kill")
        except BaseException as error:  # the top frame of a thread: who waits for it must hear of its end
            self._note(
                "failed", error=f"the launcher cannot hear its workers any more ({type(error).__name__}: {error})"
            )
            self.order(op="kill")
            for guest in [*self._present.values()]:
                self._note_end(guest, -9)
            raise

    def _patience(self) -> float | None:
        return None if self._stop.kill_at is None else max(0.0, self._stop.kill_at - time.monotonic())

    def _note_signals(self, _: Any) -> None:
        for number in self._signals.read():
            if number not in STOP_SIGNALS:
                continue
            if is_first := self._stop.note(number):
                self.order(op="signal", signum=self._stop.signum)
            if is_first or number == signal.SIGINT:
                self._tell(op="stop", signum=self._stop.signum, is_first=is_first, interrupts=self._stop.interrupts)
            self._note("stop")

    def _hear_ray(self, ray: Guarded) -> None:
        reports = ray.read()
        for report in reports or ():
            self._note(**report)
        if reports is None:
            self._selector.unregister(ray.reports)
            self._note("left")

    # ------------------------------------------------------------------ arrivals

    def _accept(self, _: Any) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, self._introduce)

    def _introduce(self, connection: socket.socket) -> None:
        """The first line. A worker sends nothing after it before it has its order."""
        self._selector.unregister(connection)
        line = b""
        with contextlib.suppress(OSError):
            line = connection.recv(_FIRST_LINE_BYTES)
        hello = _hello(line)
        if hello is None or self._is_over or not secrets.compare_digest(str(hello.get("token")), self.token):
            connection.close()
            return
        guest = self._guests.setdefault(str(hello["guest"]), Guest())
        connection.setblocking(True)
        guest.sockets[hello["kind"]] = connection
        if hello["kind"] == "orders":
            guest.hello = hello
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._hear(guest))
        self._complete()

    def _complete(self) -> None:
        """Begin the attempt once every rank is there with all of its connections."""
        ready = {guest.hello["rank"]: guest for guest in self._guests.values() if len(guest.sockets) == len(_KINDS)}
        if len(ready) < self._world_size:
            return
        self._guests, self._present = {}, dict(sorted(ready.items()))
        self._on_complete(self._present)

    # ------------------------------------------------------------------ ends

    def _hear(self, guest: Guest) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = guest.sockets["orders"].recv(65536)
        *lines, guest.rest = (guest.rest + data).split(b"\n")
        for line in lines:
            self._note_end(guest, json.loads(line)["status"])
        if not data:
            self._leave(guest)

    def _leave(self, guest: Guest) -> None:
        self._selector.unregister(guest.sockets["orders"])
        self._note_end(guest, -9)  # who goes without a word was killed, and its process with it
        self._guests = {key: other for key, other in self._guests.items() if other is not guest}
        guest.sockets["orders"].close()

    def _note_end(self, guest: Guest, status: int) -> None:
        if guest.has_ended or guest not in self._present.values():
            return
        guest.has_ended = True
        self._tell(op="exit", local_rank=guest.hello["rank"], status=status, time=time.time())


def attach(output: WorkerOutput, guests: Mapping[int, Guest]) -> None:
    """Read what these workers will write."""
    for rank, guest in guests.items():
        output.attach(rank, rank, *(guest.sockets[kind].detach() for kind in STREAMS))


def reachable_address(target: str | None) -> str:
    """This machine's address as the host `target` sees it; the loopback interface where there is none."""
    if target is None:
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


def connect(address: str, port: int, token: str, hello: Mapping[str, Any]) -> dict[str, socket.socket]:
    """A worker's connections to the hub, by kind."""
    guest = f"{os.getpid()}-{secrets.token_hex(8)}"
    sockets = {}
    for kind in _KINDS:
        sockets[kind] = socket.create_connection((address, port), timeout=30)
        sockets[kind].settimeout(None)
        first = {"token": token, "kind": kind, "guest": guest, **(hello if kind == "orders" else {})}
        sockets[kind].sendall(json.dumps(first).encode() + b"\n")
    return sockets


def _hello(line: bytes) -> dict[str, Any] | None:
    try:
        hello = json.loads(line)
    except ValueError:
        return None
    return hello if isinstance(hello, dict) and hello.get("kind") in _KINDS else None
