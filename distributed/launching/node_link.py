"""The connection of a node's launcher to the server on node 0 (`node_server.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from distributed.errors import TrainingError
from distributed.launching.listening import is_loopback, is_own_host
from distributed.launching.node_rounds import SHOWN_AFTER_S
from distributed.launching.node_server import BEAT_S, FLUSH_S, LOST_AFTER_S, seals
from distributed.launching.seal import LINE_BYTES, Seal, SealedConnection
from distributed.launching.sealed_listener import HELLO
from distributed.state import OnEvent

_RETRY_S = 0.2
_ANSWER_S = 5.0  # seconds for the server to answer the first line
_REFUSED_S = 3.0  # seconds of refused connections after which the launcher of node 0 counts as ended
_MOST_REFUSALS = 3  # refusals of this node's first line after which the secrets are reported to differ
_MOST_SILENCES = 3  # attempts without an answer after which a listener on this machine is reported as another program
_NO_NODE_0 = "the nodes do not have the same DISTRIBUTED_TOKEN (set the same one on all nodes), or another program listens at that port"
_LEAVING_S = 3.0  # seconds to send what is left at the end
_LOOK_S = 0.1  # seconds between two calls of `meanwhile`
_COUNT_DOWN_S = 30.0  # seconds between two lines with the time that is left for a lost node to come back


class NodesEndedError(TrainingError):
    """The run cannot go on because of another node. `rank` is that node, or None if this node was refused."""

    def __init__(self, why: str, rank: int | None = None, code: int = 1) -> None:
        super().__init__(why)
        self.rank, self.exit_code = rank, code


class _SecretError(ConnectionError):
    """Node 0 did not accept the first line, or answered it with another secret."""


class _SilenceError(TimeoutError):
    """A program on this machine took the first line and did not answer it."""


@dataclasses.dataclass(frozen=True)
class Round:
    """An attempt in which the nodes start their workers.

    Attributes:
        number: the number of the attempt, from 1.
        ranks: the `node_rank` of each node that takes part, in increasing order.
        nodes: the facts that each of these nodes sent about itself.
        offer: the value that node 0 sent to all nodes for this round (see `join`).
        has_lost: whether a node of the attempt before was lost.
    """

    number: int
    ranks: list[int]
    nodes: list[dict[str, Any]]
    offer: Any
    has_lost: bool = False

    def index_of(self, node_rank: int) -> int:
        """Return the index of the node among those that take part. Raises NodesEndedError if it does not take part."""
        if not self.ranks:  # the only node
            return 0
        try:
            return self.ranks.index(node_rank)
        except (ValueError, AttributeError):
            raise NodesEndedError(
                "the answer of node 0 is not a valid message: another program answers at its address, check master_addr and master_port"
            ) from None


def _is_here(host: str) -> bool:
    """Return whether `host` is known and is this machine."""
    with contextlib.suppress(OSError):
        return is_own_host(host)
    return False


class NodeLink:
    """Keep this node connected to the server on node 0. A thread sends heartbeats, reads messages and reconnects.

    Args:
        where: the host and the port of the server.
        secret: the shared secret, or "".
        rank: the number of this node; None lets node 0 choose one.
        about: the facts that this node sends about itself.
        node_timeout: seconds to wait for node 0 if it does not answer.
        on_event: shows a notice or a warning on the console of this node. Called from the thread.
        own: on node 0, the connection that the server returned.
    """

    def __init__(
        self, where: tuple[str, int], secret: str, rank: int | None, about: Mapping[str, Any], *, node_timeout: float,
        on_event: OnEvent, own: socket.socket | None = None,
    ) -> None:  # fmt: skip
        self._where, self._secret, self._rank, self._about = where, secret, rank, dict(about)
        self._node_timeout, self._on_event, self._own = node_timeout, on_event, own
        self._id = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._connection: SealedConnection | None = None
        self._round: Round | None = None
        # The newest request to node 0, which each new connection sends again.
        self._pending: dict[str, Any] | None = None
        self._end: NodesEndedError | None = None
        self._is_all_done = self._is_closed = False
        self._lost: tuple[str, float] | None = None  # (a lost node in words, the deadline of its return)
        self.is_round_wanted = False  # whether another node waits for the next round
        # Whether another node waits for the next round because all workers agreed to save and end.
        self.is_regroup = False
        self.num_newcomers = 0  # on node 0: nodes that wait until the workers have saved
        # Called with what node 0 asks of this node about its workers, see `NodeReports.obey`.
        self.on_request: Callable[[Mapping[str, Any]], None] = lambda message: None
        self.welcome: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._serve, name="node 0", daemon=True)

    def connect(self, seconds: float) -> dict[str, Any]:
        """Connect to node 0 within `seconds` and return the welcome message that it sends to every node.

        Raises:
            NodesEndedError: node 0 refuses this node, or does not answer in time.
        """
        begin = time.monotonic()
        deadline, num_refusals, num_silences, is_shown = begin + seconds, 0, 0, False
        while not self.welcome:
            try:
                self._open(deadline)
                self._read_until(lambda: bool(self.welcome), deadline)
            except OSError as error:
                self._disconnect()
                num_refusals += isinstance(error, _SecretError)
                num_silences += isinstance(error, _SilenceError)
                if not is_shown and time.monotonic() - begin > SHOWN_AFTER_S:
                    is_shown = True
                    where = f"{self._where[0]}:{self._where[1]}{', which is this machine' * _is_here(self._where[0])}"
                    text = f"waiting {seconds:g} s for node 0 at {where} (start_timeout)"
                    self._on_event({"kind": "notice", "text": text})
                if num_silences == _MOST_SILENCES and self._rank is None:
                    raise NodesEndedError(
                        f"node 0 cannot listen at {self._where[0]}:{self._where[1]}, because another program listens there and does"
                        " not answer: name another port with --master-port"
                    ) from None
                if num_refusals == _MOST_REFUSALS:
                    which = "this node" if self._rank is None else f"node {self._rank}"
                    raise NodesEndedError(f"node 0 refused the connection of {which}: {error}") from None
                if time.monotonic() > deadline:
                    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    raise NodesEndedError(
                        f"node 0 did not answer at {self._where[0]}:{self._where[1]} within {seconds:g} s (start_timeout): {why};"
                        " check master_addr and master_port, and that the launcher of node 0 is running"
                    ) from None
                time.sleep(_RETRY_S)
            if self._end is not None:
                self.close()
                raise self._end
        self._thread.start()
        return self.welcome

    def join(
        self, offer: Any, is_stopped: Callable[[], bool], failure: Any = None, *, is_regroup: bool = False
    ) -> Round | None:
        """Wait until all nodes join the next round, and return it, or None as soon as `is_stopped` is true.

        `offer` is the value that node 0 sends to all nodes when the round begins. `failure` describes the failed worker of this
        node, for the journal of node 0. `is_regroup` says that the workers of all nodes agreed to save and end for this round.

        Raises NodesEndedError if the run has ended.
        """
        with self._changed:
            before = self._round
            self._pending = {"op": "join", "offer": offer, "failure": failure, "is_regroup": is_regroup}
            self.is_round_wanted = self.is_regroup = False
            self._send(self._pending)
            next_line = time.monotonic() + _COUNT_DOWN_S
            while self._round is before and self._end is None and not is_stopped():
                self._changed.wait(0.1)
                if self._lost is not None and time.monotonic() > next_line:
                    next_line += _COUNT_DOWN_S
                    left = max(0.0, self._lost[1] - time.monotonic())
                    text = f"waiting for {self._lost[0]}: {left:.0f} s left (node_timeout)"
                    self._on_event({"kind": "notice", "text": text})
            self._pending = None
            if self._end is not None:
                raise self._end
            self._lost = None
            return None if self._round is before else self._round

    @property
    def ended(self) -> NodesEndedError | None:
        """Why the run has ended on another node, or None."""
        return self._end

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended: the workers of all nodes have, or another node has ended it."""
        return self._is_all_done or self._end is not None

    def send(self, op: str, patience_s: float = 0.0, **message: Any) -> None:
        """Send a message of `NodeReports`. It is lost if the connection breaks, or if the other end reads too slowly.

        Wait at most `patience_s` until what has not been sent yet is no more than one message.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._connection is None or self._connection.num_unsent < LINE_BYTES, patience_s
            )
            self._send({"op": op, **message})

    def fail(self, cause: str, code: int) -> None:
        """Tell the other nodes that this node has failed and is not restarted, so that they end with `code`."""
        with self._changed:
            self._pending = {"op": "failed", "cause": cause, "code": code}
            self._send(self._pending)

    def leave(self, how: str, *, is_regroup: bool) -> None:
        """Tell the other nodes that this node leaves an elastic run. They go on without it, unless they end too.

        `is_regroup` says that the workers of all nodes agreed to save and end, because this node leaves.
        """
        with self._changed:
            self._pending = {"op": "leaving", "how": how, "is_regroup": is_regroup}
            self._send(self._pending)

    def finish(
        self, how: str, code: int, *, waits: bool, is_trained: bool = False, meanwhile: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Tell the other nodes how the workers of this node ended, and that they are not started again.

        Args:
            how: the rest of a sentence about this node, such as "has finished".
            code: the exit code of the other nodes, if they need the workers of this node once more.
            waits: whether to wait until the workers of all nodes have ended, or the run has.
            is_trained: whether the workers have trained to the end. The run then no longer needs the workers of a lost node.
            meanwhile: called again and again while this waits.
        """
        with self._changed:
            self._pending = {"op": "done", "how": how, "code": code, "is_trained": is_trained}
            self._send(self._pending)
        while waits and not self.is_over:
            meanwhile()
            with self._changed:
                self._changed.wait_for(lambda: self.is_over, _LOOK_S)

    def close(self) -> None:
        """Disconnect from the server. No other method may be called afterwards."""
        self._is_closed = True
        with self._changed:
            self._send({"op": "leave"})
            self._flush(_LEAVING_S)
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(LOST_AFTER_S)
        if self._connection is not None:
            self._connection.close()

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while not self._is_closed and self._end is None:
            try:
                self._read_until(lambda: self._is_closed, float("inf"))
            except OSError as error:
                if not self._is_closed and self._end is None:
                    self._reconnect(error)

    def _reconnect(self, error: OSError) -> None:
        """Connect again, as long as node 0 may come back."""
        self._disconnect()
        begin, refused, is_shown = time.monotonic(), None, False
        while not self._is_closed and self._own is None:
            now = time.monotonic()
            if now - begin > self._node_timeout:
                break
            if not is_shown and now - begin > _REFUSED_S:
                is_shown = True
                text = f"node 0 does not answer ({error}): waiting {self._node_timeout:g} s for it (node_timeout)"
                self._on_event({"kind": "warning", "text": text})
            try:
                self._open(now + _ANSWER_S)
                return
            except ConnectionRefusedError:
                refused = refused or now
                if now - refused > _REFUSED_S:
                    break
            except OSError:
                pass
            time.sleep(_RETRY_S)
        why = (
            "its launcher has ended"
            if refused is not None
            else f"it did not answer for {self._node_timeout:g} s (node_timeout)"
        )
        self._finish(NodesEndedError(f"node 0 ({self._where[0]}) is lost: {why}", 0))

    def _finish(self, end: NodesEndedError) -> None:
        with self._changed:
            self._end = self._end or end
            self._changed.notify_all()

    def _disconnect(self) -> None:
        with self._changed:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _open(self, deadline: float) -> None:
        """Open a connection and prove the secret. Raises OSError."""
        connection = self._own
        if connection is None:
            patience = max(0.1, min(_ANSWER_S, deadline - time.monotonic()))
            connection = socket.create_connection(self._where, timeout=patience)
        try:
            word = "" if self._own is not None else uuid.uuid4().hex
            connection.settimeout(_ANSWER_S)
            if self._own is None:
                connection.sendall(Seal(self._secret, HELLO).close({"word": word}))
            line = _line(connection) if self._own is not None else _first_line(connection)
            answer = Seal(self._secret, f"word for {word}").open(line)
            if answer is None:
                raise _SecretError(_NO_NODE_0)
            from_node_0, to_node_0 = seals(self._secret, word, str(answer["word"]))
            connection.setblocking(False)
            opened = SealedConnection(connection, to_node_0, from_node_0)
            opened.send(op="here", rank=self._rank, id=self._id, about=self._about)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._connection = opened
            if self._pending is not None:  # what the broken connection may have lost
                self._send(self._pending)

    def _read_until(self, is_over: Callable[[], bool], deadline: float) -> None:
        """Handle messages of node 0 and send heartbeats until `is_over` returns True.

        Raises OSError if node 0 is silent, if the connection is broken, or after `deadline`.
        """
        connection = self._connection
        assert connection is not None
        heard = time.monotonic()
        next_beat = heard + BEAT_S
        while not is_over() and self._end is None:
            has_message = connection.wait(BEAT_S / 4)
            with contextlib.suppress(BlockingIOError):  # nothing arrived after all
                for message in connection.receive() if has_message else ():
                    heard = time.monotonic()
                    self._take(message)
            # This comes after reading, because the other end may have closed the connection after its last message.
            if connection.num_unsent:
                with self._changed:
                    connection.flush()
                    self._changed.notify_all()
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_S
                with self._changed:
                    connection.send(op="beat")
            if now - heard > LOST_AFTER_S:
                raise TimeoutError(f"silent for {LOST_AFTER_S:g} s")
            if now > deadline:
                raise TimeoutError("no answer")

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            match message["op"]:
                case "welcome":
                    if self.welcome and message.get("run_id") != self.welcome.get("run_id"):
                        why = "another launcher has taken its place, and this node can join its attempt only if it is started again"
                        self._end = NodesEndedError(f"node 0 ({self._where[0]}) is lost: {why}", 0)
                    self.welcome, self._rank = message, message["rank"]
                case "round":
                    self._round = Round(
                        message["number"], message["ranks"], message["nodes"], message["offer"], message["has_lost"]
                    )
                    self._pending, self.is_round_wanted, self.is_regroup = None, False, False
                case "again":
                    self.is_regroup = self.is_regroup or message["when"] == "soon"
                    self.is_round_wanted = self.is_round_wanted or message["when"] == "now"
                case "lost":
                    self._lost = (message["node"], time.monotonic() + message["seconds"])
                    text = f"waiting {message['seconds']:g} s for it or its replacement (node_timeout)"
                    self._on_event({"kind": "warning", "text": f"{message['node']} {message['how']}: {text}"})
                case "waiting":
                    self.num_newcomers = message["count"]
                case "stacks" | "hang":
                    self.on_request(message)
                case "gone":
                    self.on_request(message)
                    text = f"{message['node']} {message['how']}: going on without it"
                    self._on_event({"kind": "warning", "text": text})
                case "all done":
                    self._is_all_done = True
                case "end":
                    self._end = NodesEndedError(message["why"], message["rank"], message["code"])
            self._changed.notify_all()

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send `message` if there is a connection, and ignore errors: a new connection sends `_pending` again. Needs the lock."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(**message)

    def _flush(self, seconds: float) -> None:
        """Send what is left of the messages, for at most `seconds`. Needs the lock."""
        connection, deadline = self._connection, time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while connection is not None and connection.num_unsent and time.monotonic() < deadline:
                self._changed.wait(FLUSH_S)  # the thread may read meanwhile, or find that the connection is broken
                if connection is not self._connection:
                    return
                connection.flush()


def _first_line(connection: socket.socket) -> bytes:
    """Return one line. Raises _SilenceError if a program on this machine sends no line, and OSError for other problems."""
    try:
        return _line(connection)
    except TimeoutError as error:
        own, other = (str(each[0]) for each in (connection.getsockname(), connection.getpeername()))
        if own == other or is_loopback(other):
            raise _SilenceError(str(error)) from None
        raise


def _line(connection: socket.socket) -> bytes:
    """Return one line. Read byte by byte, so that nothing that follows it is lost. Raises OSError."""
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(1)
        if not data or len(line) > LINE_BYTES:
            raise _SecretError(_NO_NODE_0)
        line += data
    return line
