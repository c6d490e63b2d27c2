"""Reports of the workers of several nodes: the launcher of each node sends those of its workers to node 0, which finds hangs and slow ranks.

A launcher reports twice a second and answers when node 0 asks for stacks. Only the launcher of node 0 sees the workers of all nodes,
so it alone decides which of them hangs, and tells the launcher that has started it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distributed.launching.causes import Failure
from distributed.launching.heartbeat import Board
from distributed.launching.loader_stacks import WorkerStacks, stacks_of_workers
from distributed.launching.node_link import Round
from distributed.launching.worker_reports import MOST_CHARACTERS, WorkerReports, answers_of, checked_values

REPORT_S = 0.5  # seconds between two reports of a node
_FRESH_S = 2.0  # seconds after which a report is too old to tell whether a worker stands still
_MOST_IN_ALL = (
    2_000_000  # characters of the stacks of a node, so that they fit into what a connection keeps for a slow network
)
_HANG = ("rank", "time", "message", "reached", "phase", "location")  # the fields of a Failure that are sent


class Send(Protocol):
    """Sends a message to the launcher of node 0, or from it to those of all nodes that take part, node 0 included."""

    def __call__(self, op: str, **message: Any) -> None: ...


class NodeReports:
    """Send reports of the workers of this node, and keep on node 0 those of the workers of all nodes.

    Args:
        board: the progress and the stacks of the workers of this node.
        ask: makes these workers write their stacks.
        send: see `Send`.

    Attributes:
        workers: on node 0, the reports of the workers of all nodes, by rank.
    """

    def __init__(self, board: Board, ask: Callable[[], None], send: Send) -> None:
        self._board, self._ask, self._send = board, ask, send
        self.workers = WorkerReports(send)
        self._lock = threading.Lock()
        self._number = 0  # of the round
        self._nodes: list[int] = []  # the nodes of the round
        self._ranks: Mapping[int, int] = {}  # local rank -> rank, on this node
        self._world_size = 0
        self._next_report = 0.0
        self._heard: dict[
            int, tuple[float, frozenset[int]]
        ] = {}  # node -> (time of its newest report, the ranks in it)
        self._hang: Failure | None = None

    def begin(self, begun: Round, ranks: Mapping[int, int], world_size: int) -> None:
        """Begin an attempt. `ranks` maps the local rank of each worker of this node to its rank."""
        with self._lock:
            self._number, self._nodes, self._ranks, self._world_size = begun.number, begun.ranks, ranks, world_size
            self._heard, self._hang = {}, None
            self.workers.begin()

    # what each node does

    def report(self, watched: Mapping[int, int]) -> bool:
        """Report the workers that are at work, if it is time, and return whether it was. `watched` maps their local ranks to their ranks."""
        now = time.monotonic()
        if now < self._next_report:
            return False
        self._next_report = now + REPORT_S
        values = {str(rank): self._board.values(index) for index, rank in watched.items()}
        self._send("progress", round=self._number, workers=values)
        return True

    def take_hang(self) -> Failure | None:
        """Return the failure of a worker of this node that hangs according to node 0, once."""
        with self._lock:
            hang, self._hang = self._hang, None
            return hang

    def obey(self, message: Mapping[str, Any]) -> None:
        """Handle a message of node 0. Returns at once. May be called from any thread."""
        if message["op"] == "stacks":
            threading.Thread(target=self._answer, args=(message["number"],), name="stacks", daemon=True).start()
            return
        with self._lock:
            if message["round"] == self._number and message["rank"] in self._ranks.values():
                fields = {name: message[name] for name in _HANG}
                self._hang = Failure(**{**fields, "kind": "hang", "reached": tuple(message["reached"])})

    def _answer(self, number: int) -> None:
        with self._lock:
            begun, ranks = self._number, self._ranks
        pids = {index: self._board.progress(index).pid for index in ranks}
        found = stacks_of_workers(self._board.stacks, pids, self._ask)
        num = sum(1 + len(worker.loaders) for worker in found.values())
        most = min(MOST_CHARACTERS, _MOST_IN_ALL // max(1, num))
        for index, worker in found.items():
            for answer in answers_of(worker, most):
                self._send("answer", round=begun, rank=ranks[index], number=number, **answer)

    # what node 0 does

    def add(self, node: int, message: Mapping[str, Any]) -> None:
        """Add a report or an answer of a node. May be called from any thread.

        Raises ValueError, TypeError, KeyError or AttributeError if no launcher sends such a message.
        """
        with self._lock:
            if message["round"] != self._number or node not in self._nodes:
                return
            if message["op"] == "answer":
                self.workers.add(self._checked(message["rank"]), message)
                return
            workers = {self._checked(int(rank)): checked_values(each) for rank, each in message["workers"].items()}
            for rank, values in workers.items():
                self.workers.add(rank, {"values": values})
            self._heard[node] = (time.monotonic(), frozenset(workers))

    def _checked(self, rank: Any) -> int:
        # without a secret anyone can send a report of any rank
        if not isinstance(rank, int) or not 0 <= rank < self._world_size:
            raise ValueError("the rank is not one of this attempt")
        return rank

    @property
    def watched(self) -> frozenset[int]:
        """The ranks at work on all nodes, or no rank if those of a node are not known at the moment, or being stopped."""
        now = time.monotonic()
        with self._lock:
            heard = self._heard
            if len(heard) < len(self._nodes) or any(now - at > _FRESH_S or not ranks for at, ranks in heard.values()):
                return frozenset()
            return frozenset().union(*(ranks for _, ranks in heard.values()))

    def inspect(self, pids: Mapping[int, int], is_over: Callable[[], bool]) -> dict[int, WorkerStacks]:
        """Ask all nodes for the stacks of their workers, and return those of the workers in `pids`, by rank.

        Returns {} if a node does not answer in time, or if `is_over` returns true before.
        """
        found = self.workers.answers(pids, is_over)
        return found if found.keys() >= pids.keys() else {}

    def blame(self, hang: Failure) -> None:
        """Let the node of a worker know that it hangs."""
        fields = dataclasses.asdict(hang)
        self._send("hang", round=self._number, **{name: fields[name] for name in _HANG})
