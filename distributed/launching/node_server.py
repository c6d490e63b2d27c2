"""The server on node 0 to which the launchers of all nodes connect.

It runs in a thread of node 0's agent. Every node, node 0 included, keeps one connection to it (`node_link.py`). The server admits
nodes and detects those that are lost; `node_rounds.py` decides when they start their workers. Every line is sealed with the secret
that the nodes share (`seal.py`). Without a secret, the seals only detect garbage.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

from distributed.launching.node_rounds import Member, Report, Rounds, name_of
from distributed.launching.seal import Seal, SealedConnection
from distributed.launching.sealed_listener import SealedListener
from distributed.state import OnEvent

BEAT_S = 1.0  # seconds between two heartbeats, in both directions
LOST_AFTER_S = 10.0  # seconds of silence after which a node counts as lost
_RECONNECT_S = 3.0  # seconds for a launcher to reconnect after its connection broke; a killed launcher never does
_TICK_S = 0.25
FLUSH_S = 0.01  # seconds between two attempts to send the rest of a message

# Returns why the nodes cannot reach each other, or None.
Check = Callable[[Mapping[int, Mapping[str, Any]]], str | None]


def seals(secret: str, client: str, server: str) -> tuple[Seal, Seal]:
    """Return the seals of the lines to a node and from it. Each end contributes a random word, so lines of an earlier connection are rejected."""
    return Seal(secret, f"to node {client} {server}"), Seal(secret, f"from node {client} {server}")


class NodeServer:
    """Connect the nodes of one run.

    Args:
        bound: the socket to listen on.
        secret: the shared secret, or "".
        about: the facts about node 0. The facts in `same` must be equal on all nodes.
        welcome: the content of the message that every node gets when it has joined.
        start_timeout: seconds all nodes may take to join.
        node_timeout: seconds in which a lost node, or its replacement, must join again.
        min_nodes: the fewest nodes with which the run goes on; None: all.
        check: returns why the engine cannot connect the given nodes, or None. Called before a node joins a run that has begun.
        on_event: shows a notice or a warning on the console of node 0. Called from the thread of the server.
        record: writes an event into the journal of node 0. It also gets the time of the event if another node has written it.
            Called from the thread of the server.
        report: see `Rounds`. Called from the thread of the server.
    """

    def __init__(
        self, bound: socket.socket, secret: str, about: Mapping[str, Any], welcome: Mapping[str, Any], *,
        start_timeout: float, node_timeout: float, on_event: OnEvent, record: Callable[..., None], min_nodes: int | None = None,
        check: Check = lambda _: None, report: Report = lambda node, message: None,
    ) -> None:  # fmt: skip
        self._secret, self._about, self._welcome, self._on_event, self._check = secret, about, welcome, on_event, check
        self._num_nodes: int = about["same"]["num_nodes"]
        self._rounds = Rounds(
            self._num_nodes, min_nodes or self._num_nodes, start_timeout=start_timeout, node_timeout=node_timeout,
            on_event=on_event, record=record, report=report,
        )  # fmt: skip
        self._members = self._rounds.members
        # By node rank, for launchers that are gone: whether the launcher was silent and may come back.
        self._vacant: dict[int, bool] = {}
        # By node rank: a newcomer whose rank belongs to a connected node. It waits until that node sends a message or is lost.
        self._rivals: dict[int, tuple[SealedConnection, dict[str, Any]]] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = SealedListener(self._selector, secret, self._admit, bound)
        self._next_beat = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nodes", daemon=True)

    def start(self) -> socket.socket:
        """Start the thread and return the connection of node 0 itself, which needs no port."""
        here, there = socket.socketpair()
        there.setblocking(False)
        self._admit(there, {"word": ""})
        self._listener.open()
        self._thread.start()
        return here

    def close(self, seconds: float) -> None:
        """Wait until all other nodes have gone, at most `seconds`, and end the thread."""
        deadline = time.monotonic() + seconds
        while any(rank for rank in tuple(self._members)) and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.02)
        self._is_closed.set()
        self._thread.join()

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            unsent = [each for member in self._members.values() if (each := member.connection) and each.num_unsent]
            for connection in unsent:
                with contextlib.suppress(OSError):  # reading fails too
                    connection.flush()
            for key, _ in self._selector.select(FLUSH_S if unsent else _TICK_S):
                key.data(key.fileobj)
            self._listener.send_late_away()
            self._look_at_the_time()
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()

    def _look_at_the_time(self) -> None:
        now = time.monotonic()
        for rank, member in list(self._members.items()):
            patience = LOST_AFTER_S if member.connection is not None else _RECONNECT_S
            if now - member.heard > patience:
                is_silent = member.connection is not None
                silent = f"has been silent for {LOST_AFTER_S:g} s"
                self._vacant[rank] = is_silent
                self._lose(rank, silent if is_silent else "has ended, or its connection broke")
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._rounds.send({"op": "beat"}, *self._members)
            for rival, _ in list(self._rivals.values()):
                with contextlib.suppress(OSError):
                    rival.send(op="beat")
        self._rounds.look_at(now)

    # ------------------------------------------------------------------ connections

    def _admit(self, connection: socket.socket, hello: Mapping[str, Any]) -> None:
        """Register a connection whose first line was accepted, and answer it with a random word of the server.

        The connection belongs to no node until it sends a line that is sealed with this word.
        """
        connection.setblocking(False)
        word = uuid.uuid4().hex
        sealed = SealedConnection(connection, *seals(self._secret, str(hello.get("word")), word))
        with contextlib.suppress(OSError):
            connection.send(Seal(self._secret, f"word for {hello.get('word')}").close({"word": word}))
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(sealed))

    def _read(self, connection: SealedConnection) -> None:
        try:
            messages = connection.receive()
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        try:
            for message in messages:
                self._take(connection, message)
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            OverflowError,
        ):  # without a secret anyone can seal another message
            self._drop(connection)

    def _drop(self, connection: SealedConnection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()
        self._rivals = {rank: rival for rank, rival in self._rivals.items() if rival[0] is not connection}
        for rank, member in list(self._members.items()):
            if member.connection is connection:
                member.connection, member.heard = None, time.monotonic()
                if self._rounds.may_go(rank):
                    del self._members[rank]

    def _take(self, connection: SealedConnection, message: dict[str, Any]) -> None:
        if message["op"] == "here":
            self._welcome_or_refuse(connection, message)
            return
        rank = next((rank for rank, member in self._members.items() if member.connection is connection), None)
        if rank is None:
            return
        member = self._members[rank]
        member.heard = time.monotonic()
        if rank in self._rivals:
            self._refuse(
                self._rivals.pop(rank)[0],
                f"node_rank={rank} is taken by {member.name}: number each node differently",
            )
        # A node that has not taken part yet is not missed, unless it fails before the run has begun.
        is_newcomer = not self._rounds.takes_part(rank) and (self._rounds.has_begun or message["op"] != "failed")
        if message["op"] == "leave":
            self._lose(rank, "has ended")
        elif is_newcomer and message["op"] in ("failed", "leaving", "done"):
            self._lose_newcomer(rank, message)
        else:
            self._rounds.take(rank, message)

    def _lose_newcomer(self, rank: int, message: Mapping[str, Any]) -> None:
        """Go on without a node that ends before it has taken part: it failed, or was stopped while it waited."""
        member = self._members[rank]
        member.connection = None  # the node closes it
        if message["op"] == "failed":
            text = f"node {rank} ({member.name}) cannot take part: {message['cause']}"
            self._on_event({"kind": "warning", "text": text})
        self._lose(rank, str(message.get("how", "has failed")), code=message.get("code", 1))

    def _welcome_or_refuse(self, connection: SealedConnection, here: dict[str, Any]) -> None:
        if here["rank"] is None:
            here = {**here, "rank": self._free_rank(here["id"])}
        rank, known = here["rank"], self._members.get(here["rank"])
        if why := self._objection(here):
            self._refuse(connection, why)
            if known is None:
                which = "a node" if rank is None else f"node {rank}"
                text = f"{which} ({name_of(here['about'])}) was refused: {why}"
                self._on_event({"kind": "warning", "text": text})
        elif known is not None and known.id != here["id"]:
            self._rivals[rank] = (connection, here)
        else:
            self._join(connection, here)

    def _free_rank(self, launcher: str) -> int | None:
        """Return the number for a launcher that has none, or None if none is free.

        The lowest number that no launcher has had comes first. Those of silent nodes come last, because these may come back.
        """
        known = next((rank for rank, member in self._members.items() if member.id == launcher), None)
        if known is not None:  # its connection broke before it received its number
            return known
        taken = self._rounds.taken
        free = [rank for rank in range(1, self._num_nodes) if rank not in taken]
        return min(free, key=lambda rank: (rank in self._vacant, self._vacant.get(rank, False), rank), default=None)

    def _objection(self, here: dict[str, Any]) -> str | None:
        """Return why the node cannot take part, or None."""
        if here["rank"] is None:
            return f"all {self._num_nodes} nodes have joined already (num_nodes)"
        if not 0 <= here["rank"] < self._num_nodes:
            return f"node_rank={here['rank']} is not below num_nodes={self._num_nodes}"
        own, others = self._about["same"], here["about"]["same"]
        different = [name for name in {**own, **others} if own.get(name) != others.get(name)]
        if not different:
            nodes = {**self._rounds.nodes(), here["rank"]: here["about"]}
            return self._check(nodes) if self._rounds.has_begun else None
        pairs = ", ".join(
            f"{name} {others.get(name, 'is missing')} there and {own.get(name, 'is missing')} on node 0"
            for name in different
        )
        return f"node {here['rank']} ({name_of(here['about'])}) differs from node 0: {pairs}"

    def _refuse(self, connection: SealedConnection, why: str) -> None:
        with contextlib.suppress(OSError):
            connection.send(op="end", why=why, rank=None, code=1)
        self._drop(connection)

    def _join(self, connection: SealedConnection, here: dict[str, Any]) -> None:
        rank = here["rank"]
        self._rounds.replace_leaving(rank, here["id"])
        known = self._members.get(rank)
        if known is not None:  # the same launcher after its connection broke
            if known.connection is not None:
                self._drop(known.connection)
            known.connection, known.heard, known.asked = connection, time.monotonic(), ""
        else:
            self._vacant.pop(rank, None)
            self._rounds.come(rank, Member(here["id"], here["about"], connection, time.monotonic()))
        self._rounds.send({"op": "welcome", "rank": rank, **self._welcome}, rank)
        self._rounds.brief(rank)

    def _lose(self, rank: int, how: str, code: int = 1) -> None:
        """Go on without a node, close its connection, and let another launcher of its number join."""
        self._vacant.setdefault(rank, False)
        member = self._rounds.lose(rank, how, code)
        if member.connection is not None:
            self._drop(member.connection)
        if rival := self._rivals.pop(rank, None):
            self._join(*rival)
