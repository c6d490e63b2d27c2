"""Watch the workers of a node, or on node 0 those of all nodes: one that hangs is blamed, and one that is slow is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from distributed.launching.causes import Failure
from distributed.launching.hang_check import HangCheck
from distributed.launching.heartbeat import Board, Reports
from distributed.launching.loader_stacks import WorkerStacks, stacks_of_workers
from distributed.launching.node_reports import NodeReports
from distributed.launching.rendezvous import OneNode
from distributed.launching.request import LaunchRequest
from distributed.launching.slow_check import SlowCheck
from distributed.launching.verdicts import Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory


class ProgressCheck:
    """Check the workers of each attempt, for the agent of a node.

    Args:
        request: the request, which has the limits.
        run: the run directory.
        display: shows warnings.
        board: the progress and the stacks of the workers of this node, by local rank.
        verdicts: what is known of these workers.
        rendezvous: the connection to the other nodes.
        ask: makes the workers of this node write their stacks.
        node_of: returns (the name of the node of a rank, or "" if there is only one node; its host name).
    """

    def __init__(
        self, request: LaunchRequest, run: RunDirectory, display: Display, board: Board, verdicts: Verdicts, rendezvous: OneNode,
        ask: Callable[[], None], node_of: Callable[[int], tuple[str, str]],
    ) -> None:  # fmt: skip
        self._board, self._verdicts, self._rendezvous, self._ask = board, verdicts, rendezvous, ask
        self._ranks: Mapping[int, int] = {}  # local rank -> rank, in this attempt
        self._is_judge = request.node_rank == 0
        self._nodes: NodeReports | None = None
        reports: Reports = board  # with one node, a rank is a local rank
        place = ""
        if request.num_nodes > 1:
            self._nodes = NodeReports(
                request.node_rank, request.monitor_interval, board, lambda: verdicts.watched, ask, rendezvous.send
            )
            reports, place = self._nodes.workers, f" on node {request.node_rank}"
            rendezvous.exchange(self._nodes)
        self._hangs = HangCheck(request, run, reports, self._inspect, lambda rank: node_of(rank)[0], place)
        self._slow = SlowCheck(run, display, reports, node_of)

    def begin(self, ranks: Mapping[int, int]) -> None:
        """Begin an attempt. `ranks` maps the local rank of each worker of this node to its rank."""
        self._ranks = ranks
        if self._nodes is not None:
            self._nodes.begin(self._rendezvous.round, ranks)
        self._hangs.begin()
        self._slow.begin()

    def look(self) -> None:
        """Blame a worker that hangs, so that the workers are started again, and name one that is slow."""
        if self._nodes is None:
            own = self._own
            self._blame(self._hangs.find(own))
            self._slow.look(own)
            return
        self._blame(self._nodes.take_hang())
        if not self._nodes.report(is_done=self._verdicts.is_done):
            return
        if not self._is_judge:
            self._hangs.follow(self._own)
        elif ranks := self._nodes.watched - self._failed:
            if (hang := self._hangs.find(ranks)) is not None:
                self._nodes.blame(hang)
            self._slow.look(ranks)

    def find_late(self) -> Failure | None:
        """Return the failure of a worker for which those that have failed have waited longer than `timeout_s`, or None.

        Node 0 looks at the workers of all nodes, another node at its own.
        """
        ranks = self._own
        if self._nodes is not None and self._is_judge:
            ranks = self._nodes.last_watched - self._failed
        found = self._hangs.find_late(ranks, may_wait_elsewhere=self._nodes is not None)
        if found is None or found.rank in self._ranks.values():
            return found
        node = self._rendezvous.round.ranks[found.rank // len(self._ranks)]  # each node has as many workers
        return dataclasses.replace(found, node_rank=node)

    def _blame(self, hang: Failure | None) -> None:
        if hang is not None and hang.rank in self._own:
            self._verdicts.blame(hang)

    @property
    def _own(self) -> frozenset[int]:
        """The ranks of the workers of this node that are at work."""
        return frozenset(self._verdicts.watched.values())

    @property
    def _failed(self) -> frozenset[int]:
        """The ranks of the workers of this node that are not at work any more."""
        return frozenset(self._ranks.values()) - self._own

    def _inspect(self, pids: Mapping[int, int]) -> dict[int, WorkerStacks]:
        """Return the stacks of workers by rank, see `HangCheck`."""
        if self._nodes is None:
            return stacks_of_workers(self._board.stacks, pids, self._ask)
        if not self._is_judge:
            return self._nodes.own_stacks({index: rank for index, rank in self._ranks.items() if rank in pids})
        others, own = self._rendezvous, self._own

        def is_over() -> bool:
            return bool(others.is_over or others.num_nodes_waiting() or others.is_regroup or self._own != own)

        return self._nodes.inspect(pids, is_over)
