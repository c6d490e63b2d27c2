"""Reports of the workers of several nodes: the launcher of each node sends those of its workers to node 0, which finds hangs and slow ranks.

A launcher reports twice a second and answers when node 0 asks for stacks. Only the launcher of node 0 sees the workers of all nodes,
so it alone decides which of them hangs, and tells the launcher that has started it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distributed.launching.causes import Failure
from distributed.launching.heartbeat import Board
from distributed.launching.loader_stacks import WorkerStacks, stacks_of_workers
from distributed.launching.node_link import Round
from distributed.launching.stacks import ProcessStacks
from distributed.launching.worker_reports import WorkerReports, answers_of, checked_values

REPORT_S = 0.5  # seconds between two reports of a node
_FRESH_S = 2.0  # seconds after which a report is too old to tell whether a worker stands still
_PATIENCE_S = 10.0  # seconds for which an answer waits until earlier ones have been sent
_HANG = ("rank", "message", "reached", "phase", "location")  # the fields of a Failure that are sent


def _missing(pid: int) -> ProcessStacks:
    return ProcessStacks(pid, "", "its launcher does not answer", was_asked=False)


class Send(Protocol):
    """Sends a message to the launcher of node 0, or from it to those of all nodes that take part, node 0 included.

    Waits at most `patience_s` if there is much that has not been sent yet.
    """

    def __call__(self, op: str, patience_s: float = 0.0, **message: Any) -> None: ...


class NodeReports:
    """Send reports of the workers of this node, and keep on node 0 those of the workers of all nodes.

    Args:
        node: the number of this node.
        monitor_interval: seconds between two looks of a launcher.
        board: the progress and the stacks of the workers of this node.
        watched: returns the workers of this node that are at work: their local ranks, and their ranks.
        ask: makes the workers write their stacks.
        send: see `Send`.

    Attributes:
        workers: the reports of the workers by rank: on node 0 those of all nodes, on another node those of its own.
    """

    def __init__(
        self, node: int, monitor_interval: float, board: Board, watched: Callable[[], Mapping[int, int]], ask: Callable[[], None],
        send: Send,
    ) -> None:  # fmt: skip
        self._node, self._fresh_s = node, _FRESH_S + monitor_interval
        self._board, self._own_watched, self._ask, self._send = board, watched, ask, send
        self.workers = WorkerReports(self._ask_all, _missing)
        self._lock = threading.Lock()
        self._number = 0  # of the round
        self._nodes: list[int] = []  # the nodes of the round
        self._ranks: Mapping[int, int] = {}  # local rank -> rank, on this node
        self._next_report = 0.0
        # By node: the time of its newest report, or infinity if all its workers have ended, and the ranks at work.
        self._heard: dict[int, tuple[float, frozenset[int]]] = {}
        self._hang: Failure | None = None
        self._asked = 0, 0  # the newest request for stacks: the numbers of its round and of the request
        self._is_answering = False

    def begin(self, begun: Round, ranks: Mapping[int, int]) -> None:
        """Begin an attempt. `ranks` maps the local rank of each worker of this node to its rank. Each node has as many workers."""
        with self._lock:
            self._number, self._nodes, self._ranks = begun.number, begun.ranks, ranks
            self._heard, self._hang = {}, None
            self.workers.begin()

    # what each node does

    def report(self, *, is_done: bool) -> bool:
        """Report the workers that are at work, if it is time, and return whether it was.

        `is_done` tells whether all workers of this node have ended without a failure.
        """
        now = time.monotonic()
        if now < self._next_report:
            return False
        self._next_report = now + REPORT_S
        values = {str(rank): self._board.values(index) for index, rank in self._own_watched().items()}
        message: dict[str, Any] = {"round": self._number, "workers": values, "done": is_done}
        self.add(self._node, {"op": "progress", **message})
        if self._node:
            self._send("progress", **message)
        return True

    def take_hang(self) -> Failure | None:
        """Return the failure of a worker of this node that hangs according to node 0, once."""
        with self._lock:
            hang, self._hang = self._hang, None
            return hang

    def obey(self, message: Mapping[str, Any]) -> None:
        """Handle a message of node 0. Returns at once. May be called from any thread."""
        with self._lock:
            if message["op"] == "gone":  # the others go on without this node, perhaps in the same attempt
                self._heard[message["rank"]] = math.inf, frozenset()
            elif message["round"] != self._number:
                return
            elif message["op"] == "stacks":
                self._asked = self._number, message["number"]
                if not self._is_answering:
                    self._is_answering = True
                    threading.Thread(target=self._answer, name="stacks for node 0", daemon=True).start()
            elif message["rank"] in self._ranks.values():
                fields = {name: message[name] for name in _HANG} | {"reached": tuple(message["reached"])}
                self._hang = Failure(kind="hang", time=time.time(), **fields)

    def _answer(self) -> None:
        """Send the stacks of the workers of this node that are at work. Repeat this if node 0 has asked again meanwhile."""
        answered = None
        while True:
            with self._lock:
                asked = self._asked
                if asked == answered or asked[0] != self._number:
                    self._is_answering = False
                    return
            try:
                self._send_stacks(*asked)
            except OSError:  # the workers or the run have been ended meanwhile
                pass
            except BaseException:
                with self._lock:
                    self._is_answering = False
                raise
            answered = asked

    def _send_stacks(self, begun: int, number: int) -> None:
        if not (ranks := self._own_watched()):
            return
        found = self.own_stacks(ranks)
        for rank in self._own_watched().values():  # not those that have failed meanwhile, and could not answer
            for answer in answers_of(found[rank]) if rank in found else ():
                message = {"round": begun, "rank": rank, "number": number, **answer}
                message["values"] = self.workers.values(rank)
                if self._node:
                    self._send("answer", _PATIENCE_S, **message)
                else:
                    self.add(0, {"op": "answer", **message})

    def own_stacks(self, ranks: Mapping[int, int]) -> dict[int, WorkerStacks]:
        """Return the stacks of workers of this node by rank, and update their reports. `ranks` maps their local ranks to their ranks."""
        pids = {index: self._board.progress(index).pid for index in ranks}
        found = stacks_of_workers(self._board.stacks, pids, self._ask)
        for index, rank in ranks.items():
            self.workers.add(rank, {"values": self._board.values(index)})
        return {ranks[index]: worker for index, worker in found.items()}

    # what node 0 does

    def add(self, node: int, message: Mapping[str, Any]) -> None:
        """Add a report or an answer of a node. May be called from any thread.

        Raises ValueError, TypeError, KeyError or AttributeError if no launcher sends such a message.
        """
        with self._lock:
            if message["round"] != self._number or node not in self._nodes:
                return
            if message["op"] == "answer":
                answer = {name: message[name] for name in ("values", "stacks", "number", "loader")}
                self.workers.add(self._checked(message["rank"], node), answer)
                return
            workers = {
                self._checked(int(rank), node): checked_values(each) for rank, each in message["workers"].items()
            }
            for rank, values in workers.items():
                self.workers.add(rank, {"values": values})
            for rank in self._heard.get(node, (0.0, frozenset()))[1] - workers.keys():
                self.workers.end(rank)
            self._heard[node] = (math.inf if message["done"] else time.monotonic(), frozenset(workers))

    def _checked(self, rank: Any, node: int) -> int:
        # without a secret anyone can send a report of any rank
        begin = self._nodes.index(node) * len(self._ranks)
        if not isinstance(rank, int) or not begin <= rank < begin + len(self._ranks):
            raise ValueError(f"the rank is not one of node {node}")
        return rank

    @property
    def watched(self) -> frozenset[int]:
        """The ranks at work on all nodes, or no rank if those of a node are not known at the moment, or being stopped."""
        with self._lock:
            if not all(self._is_known(node) for node in self._nodes):
                return frozenset()
        return self.last_watched

    def _is_known(self, node: int) -> bool:
        """Return whether the ranks at work on a node are known. Needs the lock."""
        at, ranks = self._heard.get(node, (-math.inf, frozenset()))
        if at == math.inf:  # all of them have ended
            return True
        # This node itself does not report while it waits for stacks.
        return bool(ranks) and (node == self._node or time.monotonic() - at <= self._fresh_s)

    @property
    def last_watched(self) -> frozenset[int]:
        """The ranks that were at work according to the newest report of each node, however old it is."""
        with self._lock:
            return frozenset().union(*(ranks for _, ranks in self._heard.values()))

    def inspect(self, pids: Mapping[int, int], is_over: Callable[[], bool]) -> dict[int, WorkerStacks]:
        """Ask all nodes for the stacks of their workers, and return those of the workers in `pids` by rank.

        Those of a launcher that does not answer, although it still sends reports, are empty. Returns {} if a launcher does neither, or if
        `is_over` returns true before all have answered.
        """
        found = self.workers.inspect(pids, is_over)
        return {} if is_over() or not pids.keys() <= self.watched else found

    def _ask_all(self, op: str, number: int) -> None:
        self._send(op, round=self._number, number=number)

    def blame(self, hang: Failure) -> None:
        """Let the node of a worker know that it hangs."""
        fields = dataclasses.asdict(hang)
        self._send("hang", round=self._number, **{name: fields[name] for name in _HANG})
