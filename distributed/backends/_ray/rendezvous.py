"""Connect the launcher over TCP with the workers that Ray placed, on one machine or on several.

A Ray worker opens four connections: one for commands, and three that become the stdout, stderr and control pipe of its
process. Each connection begins with a line that is sealed with the token of this launch. On the connection for commands
all further lines are sealed too. The token itself is sent only through Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed.launching.output import WorkerOutput
from distributed.launching.seal import LINE_BYTES, Seal
from distributed.launching.sealed_listener import HELLO, SealedListener
from distributed.launching.stopping import Signals, Stop
from distributed.launching.subreaper import Subreaper
from distributed.runs.processes import STOP_SIGNALS

# A machine that is silent for ten seconds counts as lost: (level, option, value) of its connections. An idle connection sends
# enough probes in this time that a network which loses some packets does not break it.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 8),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000),
)  # fmt: skip
# Errors of reading from a machine that did not answer for so long. If only its process has ended, reading raises none of
# them.
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
STREAMS = ("stdout", "stderr", "control")
_KINDS = ("commands", *STREAMS)


@dataclasses.dataclass
class WorkerConnections:
    """The launcher's side of the connections with one Ray worker of this attempt."""

    commands: Seal  # seal of the lines that the worker receives
    answers: Seal  # seal of the lines that the worker sends
    sockets: dict[str, socket.socket] = dataclasses.field(default_factory=dict)
    hello: dict[str, Any] = dataclasses.field(default_factory=dict)
    rest: bytes = b""
    has_ended: bool = False

    def send(self, **command: Any) -> None:
        """Send a command. Do nothing if the worker has gone or has not opened its connection for commands yet."""
        with contextlib.suppress(OSError, KeyError):
            self.sockets["commands"].sendall(self.commands.close(command))


class RendezvousServer:
    """A thread that accepts the workers, starts an attempt when all of them have connected, and sends them commands and
    signals.

    Args:
        signals: the signals of this process.
        stop: records the signals that stop the run.
        send: called when a stop is requested and when a worker ends.
        on_complete: called with the workers of an attempt by rank, when all of them have connected.
        on_answer: called with the rank of a worker of this attempt and what it has sent. It may raise TypeError, ValueError or
            KeyError if no worker sends this.
        add_news: called when a stop is requested and with the events of Ray's process.
    """

    def __init__(
        self,
        signals: Signals,
        stop: Stop,
        send: Callable[..., None],
        on_complete: Callable[[dict[int, WorkerConnections]], None],
        on_answer: Callable[[int, dict[str, Any]], None],
        add_news: Callable[..., None],
    ) -> None:
        self._signals, self._stop = signals, stop
        self._send, self._on_complete, self._on_answer, self._add_news = send, on_complete, on_answer, add_news
        self._lock = threading.RLock()
        self._joining: dict[str, WorkerConnections] = {}  # by each worker's random name
        self._joined: dict[int, WorkerConnections] = {}  # the workers of a complete attempt, by rank
        self._broken = 0  # attempts up to this number have lost a worker, and do not begin any more
        self.num_lost = 0  # workers of this attempt that have gone without an exit status, as when their node is lost
        self._silent: set[str] = set()  # nodes of this attempt that do not answer
        self._is_over = False  # if True, workers that Ray starts later are refused
        self._is_closed = False
        self.token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self.listener = SealedListener(self._selector, self.token, self._admit)
        self._selector.register(signals, selectors.EVENT_READ, self._read_signals)
        self._thread = threading.Thread(target=self._serve, name="workers of Ray", daemon=True)

    def start(self, ray: Subreaper) -> None:
        """Start the thread. It accepts workers once Ray's process has reported that it listens on the port."""
        self._selector.register(ray.events, selectors.EVENT_READ, lambda _: self._read_events(ray))
        self._thread.start()

    def close(self) -> None:
        """Read nothing more. Call this before the signals are closed, because the end of Ray's process sends one more."""
        with self._lock:
            self._is_closed = True

    def send_to_all(self, **command: Any) -> None:
        """Send a command to every worker of this attempt."""
        with self._lock:
            for worker in self._joined.values():
                worker.send(**command)

    def silent(self) -> dict[str, list[int]]:
        """Return the nodes of this attempt that do not answer, by their Ray ids, with the ranks there."""
        with self._lock:
            return {
                node: [rank for rank, worker in self._joined.items() if worker.hello["node"] == node]
                for node in sorted(self._silent)
            }

    def end_attempt(self, *, restart: bool) -> None:
        """End this attempt and its workers. With `restart` Ray starts the workers of the next attempt.

        The command names the nodes that do not answer, and the workers pass these names on to Ray's process. Without `restart`,
        workers that connect later are refused: Ray may restart workers that died, whatever the launcher decides.
        """
        with self._lock:
            silent = self.silent()
            self.send_to_all(op="end", restart=restart, **({"silent": silent} if silent else {}))
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
                        if self._is_closed:
                            return
                        key.data(key.fileobj)
                self.listener.send_late_away()
                if self._stop.is_due():
                    self.send_to_all(op="kill")
        except BaseException as error:  # top frame of a thread: report the error to the thread that waits
            self._add_news(
                "failed", error=f"the launcher stopped listening to its workers ({type(error).__name__}: {error})"
            )
            self.send_to_all(op="kill")
            for worker in [*self._joined.values()]:
                self._end_worker(worker, -9, is_lost=True)
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
                self.send_to_all(op="signal", signum=self._stop.signum)
            if is_first or number == signal.SIGINT:
                self._send(
                    op="stop", signum=self._stop.signum, is_first=is_first, interrupts=self._stop.interrupts,
                    is_starting=not self._joined,
                )  # fmt: skip
            self._add_news("stop")

    def _read_events(self, ray: Subreaper) -> None:
        events = ray.read()
        for event in events or ():
            if event["news"] == "lost":
                self._break(event["attempt"])
                continue
            if event["news"] == "joined":
                self.listener.open()
            self._add_news(**event)
        if events is None:
            self._selector.unregister(ray.events)
            self._add_news("left")

    # ------------------------------------------------------------------ arrivals

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Add a connection to its worker, or close the connection if the run is over."""
        if self._is_over:
            connection.close()
            return
        _keep_alive(connection)
        name = str(hello["worker"])
        worker = self._joining.setdefault(name, WorkerConnections(*seals(self.token, name)))
        worker.sockets[hello["kind"]] = connection
        if hello["kind"] == "commands":
            worker.hello = hello
            self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read_answers(worker))
            if 0 < (hello.get("attempt") or 0) <= self._broken:
                self._send_back([name])
        self._complete()

    def _complete(self) -> None:
        """Begin the attempt if all of its workers, one for each rank, have opened all of their connections."""
        ready = [worker for worker in self._joining.values() if len(worker.sockets) == len(_KINDS)]
        size = ready[-1].hello["world_size"] if ready else 0
        workers = {worker.hello["rank"]: worker for worker in ready if worker.hello["world_size"] == size}
        if not ready or len(workers) < size:
            return
        self._joining, self._joined, self.num_lost, self._silent = {}, dict(sorted(workers.items())), 0, set()
        self._on_complete(self._joined)

    # ------------------------------------------------------------------ ends

    def _read_answers(self, worker: WorkerConnections) -> None:
        data = b""
        try:
            data = worker.sockets["commands"].recv(65536)
        except OSError as error:
            if error.errno in _SILENCE and worker in self._joined.values():
                self._silent.add(worker.hello["node"])
        *lines, worker.rest = (worker.rest + data).split(b"\n")
        answers = [worker.answers.open(line) for line in lines]
        # the worker has gone, or a line is wrong
        if not all(self._take(worker, answer) for answer in answers) or not data or len(worker.rest) > LINE_BYTES:
            self._drop(worker)

    def _take(self, worker: WorkerConnections, answer: dict[str, Any] | None) -> bool:
        """Handle an answer of a worker, and return False if it is wrong. None is a line whose seal is wrong."""
        if answer is None:
            return False
        try:
            if worker in self._joined.values() and not worker.has_ended:
                self._on_answer(worker.hello["rank"], answer)
                if "values" in answer:
                    worker.send(op="seen")
            if "status" in answer:
                self._end_worker(worker, int(answer["status"]))
        except (TypeError, ValueError, KeyError):
            return False
        return True

    def _drop(self, worker: WorkerConnections) -> None:
        self._selector.unregister(worker.sockets["commands"])
        if worker in self._joined.values() and not worker.has_ended:
            self.num_lost += 1
        # A worker that reports no exit status was killed together with its training process.
        self._end_worker(worker, -9, is_lost=True)
        is_joining = worker in self._joining.values()
        self._joining = {key: other for key, other in self._joining.items() if other is not worker}
        worker.sockets["commands"].close()
        if is_joining and (attempt := worker.hello.get("attempt")) is not None:
            self._break(attempt)

    def _break(self, attempt: int) -> None:
        """Do not begin this attempt, because it lost a worker before all had connected. The others start with the next attempt.

        The workers of an attempt that has begun receive nothing here, because the verdict on the attempt decides.
        """
        self._broken = max(self._broken, attempt)
        self._send_back([name for name, worker in self._joining.items() if worker.hello.get("attempt") == attempt])

    def _send_back(self, names: list[str]) -> None:
        for name in names:
            self._joining.pop(name).send(op="end", restart=True)

    def _end_worker(self, worker: WorkerConnections, status: int, *, is_lost: bool = False) -> None:
        if worker.has_ended or worker not in self._joined.values():
            return
        worker.has_ended = True
        self._send(op="exit", local_rank=worker.hello["rank"], status=status, time=time.time(), is_lost=is_lost)


def _keep_alive(connection: socket.socket) -> None:
    for level, option, value in _KEEPALIVE:
        connection.setsockopt(level, option, value)


def attach(output: WorkerOutput, workers: Mapping[int, WorkerConnections]) -> None:
    """Let `output` read the stdout, stderr and control connections of `workers`."""
    for rank, worker in workers.items():
        output.attach(rank, rank, *(worker.sockets[kind].detach() for kind in STREAMS))


def seals(token: str, worker: str) -> tuple[Seal, Seal]:
    """Return two seals, for the commands to a worker and for its answers. Both sides create the same seals."""
    return Seal(token, f"commands to {worker}"), Seal(token, f"answers of {worker}")


@dataclasses.dataclass
class LauncherConnections:
    """The worker's side of the connections of a Ray worker with the rendezvous server."""

    sockets: dict[str, socket.socket]
    commands: Seal
    answers: Seal
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the launcher's commands until the launcher closes the connection or the seal of a line is wrong."""
        with contextlib.suppress(OSError), self.sockets["commands"].makefile("rb") as lines:
            while (line := lines.readline(LINE_BYTES)) and (command := self.commands.open(line)) is not None:
                yield command

    def send(self, **answer: Any) -> None:
        """Send an answer to the launcher. May be called from any thread."""
        with self.lock:
            self.sockets["commands"].sendall(self.answers.close(answer))


def connect(address: str, port: int, token: str, hello: Mapping[str, Any]) -> LauncherConnections:
    """Connect to the rendezvous server at `address` and `port` as the worker that `hello` describes."""
    worker = f"{os.getpid()}-{secrets.token_hex(8)}"
    sockets = {}
    for kind in _KINDS:
        sockets[kind] = socket.create_connection((address, port), timeout=30)
        sockets[kind].settimeout(None)
        _keep_alive(sockets[kind])
        first = {"kind": kind, "worker": worker, **(hello if kind == "commands" else {})}
        sockets[kind].sendall(Seal(token, HELLO).close(first))
    return LauncherConnections(sockets, *seals(token, worker))
