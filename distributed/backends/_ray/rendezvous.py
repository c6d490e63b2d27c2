"""Rendezvous of the launcher with the workers that Ray placed, on one machine or on several, over TCP.

A Ray worker opens four connections: one for orders, and three that become the stdout, stderr and control pipe of its process. Each
connection begins with a line that is sealed with the token of this launch. On the connection for orders all further lines are
sealed too. The token itself is sent through Ray only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed.backends._ray.listener import HELLO, WorkerListener
from distributed.backends._ray.seal import LINE_BYTES, Seal
from distributed.launching.output import WorkerOutput
from distributed.launching.stopping import Signals, Stop
from distributed.launching.subreaper import Subreaper
from distributed.runs.processes import STOP_SIGNALS

STREAMS = ("stdout", "stderr", "control")
_KINDS = ("orders", *STREAMS)


@dataclasses.dataclass
class WorkerConnections:
    """The connections of one Ray worker of this attempt, on the side of the launcher."""

    orders: Seal  # seal of the lines that the worker receives
    answers: Seal  # seal of the lines that the worker sends
    sockets: dict[str, socket.socket] = dataclasses.field(default_factory=dict)
    hello: dict[str, Any] = dataclasses.field(default_factory=dict)
    rest: bytes = b""
    has_ended: bool = False

    def send(self, **order: Any) -> None:
        """Send an order. Do nothing if the worker has gone or has not opened its connection for orders yet."""
        with contextlib.suppress(OSError, KeyError):
            self.sockets["orders"].sendall(self.orders.close(order))


class RendezvousServer:
    """A thread that accepts the workers, starts an attempt when all have connected, and passes orders and signals on to them.

    `send` is called when a stop is requested and when a worker ends. `on_complete` is called with the workers of an attempt by
    rank, when all of them have connected. `add_news` is called when a stop is requested and with the reports of Ray's process.
    """

    def __init__(
        self,
        world_size: int,
        signals: Signals,
        stop: Stop,
        send: Callable[..., None],
        on_complete: Callable[[dict[int, WorkerConnections]], None],
        add_news: Callable[..., None],
    ) -> None:
        self._world_size, self._signals, self._stop = world_size, signals, stop
        self._send, self._on_complete, self._add_news = send, on_complete, add_news
        self._lock = threading.RLock()
        self._joining: dict[str, WorkerConnections] = {}  # by the name that each has drawn
        self._joined: dict[int, WorkerConnections] = {}  # the workers of a complete attempt, by rank
        self._is_over = False  # if True, workers that Ray still starts are refused
        self.token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self.listener = WorkerListener(self._selector, self.token, self._admit)
        self._selector.register(signals, selectors.EVENT_READ, self._read_signals)
        self._thread = threading.Thread(target=self._serve, name="workers of Ray", daemon=True)

    def start(self, ray: Subreaper) -> None:
        """Start the thread. It accepts workers when Ray's process has reported that it has opened the port."""
        self._selector.register(ray.reports, selectors.EVENT_READ, lambda _: self._read_reports(ray))
        self._thread.start()

    def order(self, **order: Any) -> None:
        """Send an order to every worker of this attempt."""
        with self._lock:
            for worker in self._joined.values():
                worker.send(**order)

    def end_attempt(self, *, restart: bool) -> None:
        """End this attempt and its workers. With `restart` Ray starts them again, and they are the next attempt.

        Without `restart` workers that connect later are refused. Ray may restart workers that it saw die in any case.
        """
        with self._lock:
            self.order(op="end", restart=restart)
            self._joined = {}
            if not restart:
                self._is_over = True
                for worker in self._joining.values():
                    worker.send(op="end", restart=False)

    def _serve(self) -> None:
        try:
            while True:
                for key, _ in self._selector.select(self._patience_s()):
                    with self._lock:
                        key.data(key.fileobj)
                self.listener.send_late_away()
                if self._stop.is_due():
                    self.order(op="kill")
        except BaseException as error:  # the top frame of a thread: report its end to the thread that waits
            self._add_news(
                "failed", error=f"the launcher stopped listening to its workers ({type(error).__name__}: {error})"
            )
            self.order(op="kill")
            for worker in [*self._joined.values()]:
                self._end_worker(worker, -9)
            raise

    def _patience_s(self) -> float | None:
        kill_at = self._stop.kill_at
        waits = [self.listener.patience_s, None if kill_at is None else max(0.0, kill_at - time.monotonic())]
        return min((wait for wait in waits if wait is not None), default=None)

    def _read_signals(self, _: Any) -> None:
        for number in self._signals.read():
            if number not in STOP_SIGNALS:
                continue
            if is_first := self._stop.add(number):
                self.order(op="signal", signum=self._stop.signum)
            if is_first or number == signal.SIGINT:
                self._send(
                    op="stop", signum=self._stop.signum, is_first=is_first, interrupts=self._stop.interrupts,
                    is_starting=not self._joined,
                )  # fmt: skip
            self._add_news("stop")

    def _read_reports(self, ray: Subreaper) -> None:
        reports = ray.read()
        for report in reports or ():
            if report["news"] == "joined":
                self.listener.open()
            self._add_news(**report)
        if reports is None:
            self._selector.unregister(ray.reports)
            self._add_news("left")

    # ------------------------------------------------------------------ arrivals

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Take a connection of a worker, or close it if the run is over."""
        if self._is_over:
            connection.close()
            return
        name = str(hello["worker"])
        worker = self._joining.setdefault(name, WorkerConnections(*seals(self.token, name)))
        worker.sockets[hello["kind"]] = connection
        if hello["kind"] == "orders":
            worker.hello = hello
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read_answers(worker))
        self._complete()

    def _complete(self) -> None:
        """Begin the attempt if every rank has opened all of its connections."""
        ready = {
            worker.hello["rank"]: worker for worker in self._joining.values() if len(worker.sockets) == len(_KINDS)
        }
        if len(ready) < self._world_size:
            return
        self._joining, self._joined = {}, dict(sorted(ready.items()))
        self._on_complete(self._joined)

    # ------------------------------------------------------------------ ends

    def _read_answers(self, worker: WorkerConnections) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = worker.sockets["orders"].recv(65536)
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        answers = [worker.answers.open(line) for line in lines]
        for answer in filter(None, answers):
            self._end_worker(worker, int(answer["status"]))
        # the worker has gone, or the seal of a line is wrong
        if not data or None in answers or len(worker.rest) > LINE_BYTES:
            self._drop(worker)

    def _drop(self, worker: WorkerConnections) -> None:
        self._selector.unregister(worker.sockets["orders"])
        self._end_worker(worker, -9)  # a worker that reports no exit status was killed together with its process
        self._joining = {key: other for key, other in self._joining.items() if other is not worker}
        worker.sockets["orders"].close()

    def _end_worker(self, worker: WorkerConnections, status: int) -> None:
        if worker.has_ended or worker not in self._joined.values():
            return
        worker.has_ended = True
        self._send(op="exit", local_rank=worker.hello["rank"], status=status, time=time.time())


def attach(output: WorkerOutput, workers: Mapping[int, WorkerConnections]) -> None:
    """Let `output` read the stdout, stderr and control connections of `workers`."""
    for rank, worker in workers.items():
        output.attach(rank, rank, *(worker.sockets[kind].detach() for kind in STREAMS))


def seals(token: str, worker: str) -> tuple[Seal, Seal]:
    """Return the seals of the orders to a worker and of its answers. Both sides create them."""
    return Seal(token, f"orders to {worker}"), Seal(token, f"answers of {worker}")


@dataclasses.dataclass
class LauncherConnections:
    """The connections of a Ray worker to the rendezvous server, on the side of the worker."""

    sockets: dict[str, socket.socket]
    orders: Seal
    answers: Seal

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the launcher's orders until it closes the connection or a line is not sealed by it."""
        with contextlib.suppress(OSError), self.sockets["orders"].makefile("rb") as lines:
            while (line := lines.readline(LINE_BYTES)) and (order := self.orders.open(line)) is not None:
                yield order

    def send(self, **answer: Any) -> None:
        """Send an answer to the launcher."""
        self.sockets["orders"].sendall(self.answers.close(answer))


def connect(address: str, port: int, token: str, hello: Mapping[str, Any]) -> LauncherConnections:
    """Connect to the rendezvous server at `address` and `port` as the worker that `hello` describes."""
    worker = f"{os.getpid()}-{secrets.token_hex(8)}"
    sockets = {}
    for kind in _KINDS:
        sockets[kind] = socket.create_connection((address, port), timeout=30)
        sockets[kind].settimeout(None)
        first = {"kind": kind, "worker": worker, **(hello if kind == "orders" else {})}
        sockets[kind].sendall(Seal(token, HELLO).close(first))
    return LauncherConnections(sockets, *seals(token, worker))
