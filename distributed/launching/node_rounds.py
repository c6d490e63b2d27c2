"""Decide from the messages of the nodes when they start their workers together.

A round is one attempt in which all nodes start their workers. `NodeServer` calls this module from its thread, and passes the
messages of the nodes to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.launching.seal import SealedConnection
from distributed.state import OnEvent

SHOWN_AFTER_S = 3.0  # seconds of waiting for other nodes at the start before a line is shown
_LAST_CALL_S = 10.0  # seconds for more nodes to join the first round once `min_nodes` have joined
_LEAVING_S = 2.0  # seconds for the other nodes to report how their workers ended, after a node has left on SIGTERM
_TOO_LATE = {"op": "end", "why": "the run has ended before this node could take part", "rank": None, "code": 0}
# Takes a message of a node about its workers.
Report = Callable[[int, Mapping[str, Any]], None]
# The fields of a `worker_failed` event besides rank and cause: those with a text, and those with a number.
_FACTS, _NUMBERS = ("kind", "phase", "place", "then"), ("in_step", "micro_batch", "fit")


@dataclasses.dataclass
class Member:
    """A node that has joined. `id` is new for each launcher. `about` has the facts that the launcher sent about its node."""

    id: str
    about: dict[str, Any]
    connection: SealedConnection | None  # None between a broken connection and the next one
    heard: float  # when its last line arrived, or when its connection broke
    offer: Any = None  # what node 0 tells all nodes at the beginning of the round
    wants: bool = False  # whether it waits for the next round
    is_regroup: bool = False  # whether its workers have saved and ended for the next round
    # Whether it was told that another node waits for the next round: "soon" if its workers are about to end, else "now".
    asked: str = ""
    is_new: bool = False  # whether it came after the first round, and has not taken part in a round yet

    @property
    def name(self) -> str:
        """The host name and address of the node."""
        return name_of(self.about)


def name_of(about: Mapping[str, Any]) -> str:
    """Return the host name and address of a node from the facts that it sent about itself."""
    return f"{about['name']}, {about['address']}" if about.get("address") else str(about["name"])


def _nodes(ranks: Sequence[int]) -> str:
    return f"node{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Rounds:
    """Decide when a round begins, and tell the nodes when one of them is lost or has failed.

    Args:
        num_nodes: the number of nodes.
        min_nodes: the fewest nodes with which the run goes on.
        start_timeout: seconds all nodes may take to join.
        node_timeout: seconds in which a lost node, or its replacement, must join again.
        on_event: shows a notice or a warning on the console of node 0.
        record: writes an event into the journal of node 0. It also gets the time of the event if another node has written it.
        report: called with the number of a node and a message about its workers, see `NodeReports.add`.
    """

    def __init__(
        self, num_nodes: int, min_nodes: int, *, start_timeout: float, node_timeout: float, on_event: OnEvent,
        record: Callable[..., None], report: Report,
    ) -> None:  # fmt: skip
        self._num_nodes, self._min_nodes = num_nodes, min_nodes
        self._start_timeout, self._node_timeout = start_timeout, node_timeout
        self._on_event, self._record, self._report = on_event, record, report
        self.members: dict[int, Member] = {}  # the nodes that have joined, by node rank
        self._round = 0
        self._deadline = time.monotonic() + start_timeout
        self._shown_at = time.monotonic() + SHOWN_AFTER_S  # when a line says which nodes are waited for
        self._last_call: float | None = None  # when the first round begins without all nodes
        self._taking_part: dict[int, str] = {}  # the nodes of the last round: node rank -> id of the launcher
        self._has_lost = False  # whether one of them was lost since
        self._num_waiting = 0  # the number of waiting nodes that node 0 was last told
        # By node rank: how the workers of a node ended, and the exit code.
        self._done: dict[int, tuple[str, int]] = {}
        self._is_trained = False  # whether the workers of a node that is done have trained to the end
        # By node rank: a node that leaves on SIGTERM, how, and when the others are told.
        self._leaving: dict[int, tuple[Member, str, float]] = {}
        # By node rank: a lost node in words, and the deadline of its return.
        self._lost: dict[int, tuple[str, float]] = {}
        self._failures: dict[int, dict[str, Any]] = {}  # the newest failure of a worker, by node rank
        self._is_all_done = False
        self._end: dict[str, Any] | None = None  # the last message to every node

    # ------------------------------------------------------------------ messages and losses of nodes

    def take(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a message of a node: it joins the next round, has failed, leaves, is done, or reports on its workers."""
        member = self.members[rank]
        if message["op"] == "join":
            member.wants, member.offer, member.is_regroup = True, message["offer"], bool(message["is_regroup"])
            self._record_failure(rank, message.get("failure"))
            if self.takes_part(rank):
                for leaving in list(self._leaving):
                    self._let_go(leaving)
            self._begin_round_if_complete()
        elif message["op"] in ("progress", "answer"):
            self._report(rank, message)
        elif message["op"] in ("stacks", "hang") and rank == 0:
            self.send(message, *self._taking_part)
        elif message["op"] == "failed":
            self._finish(message["cause"], rank, code=message["code"], but=rank)
        elif message["op"] == "leaving":
            member.is_regroup = bool(message["is_regroup"])
            # After a regroup, the workers of the other nodes may still be saving.
            patience = self._node_timeout if member.is_regroup else _LEAVING_S
            self._leaving[rank] = (member, message["how"], time.monotonic() + patience)
            if self._end_if_all_are_done():
                return
            if self._wants_another_round():
                self._let_go(rank)
            elif member.is_regroup:
                self._ask_for_a_round(is_regroup=True)
        elif message["op"] == "done":
            self._done[rank] = (f"node {rank} ({member.name}) {message['how']}", message["code"])
            self._is_trained = self._is_trained or bool(message["is_trained"])
            if not self._end_if_all_are_done():
                self._announce_newcomers()
                if self._wants_another_round():
                    self._ask_for_a_round()

    def lose(self, rank: int, how: str, code: int = 1) -> Member:
        """Remove a node from the members and return it. If its end was not expected, decide how the run goes on without it."""
        is_expected, takes_part = self._is_all_done or self.may_go(rank), self.takes_part(rank)
        member = self.members.pop(rank)
        if not is_expected:
            self._go_on_without(rank, member, how, code=code, takes_part=takes_part)
        return member

    def come(self, rank: int, member: Member) -> None:
        """Add a node that has joined."""
        self.members[rank] = member
        if self._lost.pop(rank, None):
            self._on_event({"kind": "notice", "text": f"node {rank} ({member.name}) has joined again"})
            self._record("node_joined", node=rank, host=member.name)
        else:
            member.is_new = self._round > 0

    def replace_leaving(self, rank: int, launcher: str) -> None:
        """Go on without the node `rank` if it is leaving and `launcher`, which now has this rank, is another launcher."""
        if rank in self._leaving and self._leaving[rank][0].id != launcher:
            self._let_go(rank)

    def brief(self, rank: int) -> None:
        """Send the state of the run to a node that has joined or reconnected."""
        if self._end is not None:
            self.send(self._end, rank)
        elif self._is_all_done:
            self.send({"op": "all done"} if self.takes_part(rank) else _TOO_LATE, rank)
        elif self._round and not self.takes_part(rank) and self._done and self._min_nodes == self._num_nodes:
            self._finish_because_done()  # this one replaces a node whose workers the others still need
        elif self._round and not self.takes_part(rank):  # a lost node's workers wait for those of the others
            self.send({"op": "again", "when": "now"}, rank)
        elif self._round and self._wants_another_round():
            self._ask_for_a_round()

    def look_at(self, now: float) -> None:
        """Do what is due at the time `now` (`time.monotonic`)."""
        if self._end is not None:
            return
        for rank, (_, _, deadline) in list(self._leaving.items()):
            if now > deadline and not self._is_all_done:
                self._let_go(rank)
        missing = [rank for rank in range(self._num_nodes) if rank not in self.members]
        if self._round == 0 and self._may_begin_without(missing):
            self._last_call = self._last_call or now + _LAST_CALL_S
            if missing and now > self._last_call:
                self._begin_round_if_complete()
        elif self._round == 0 and missing and now > self._deadline:
            self._finish(f"{_nodes(missing)} did not join within {self._start_timeout:g} s (start_timeout)", missing[0])
        elif self._round == 0 and missing and now > self._shown_at:
            self._shown_at = math.inf
            text = f"waiting {self._start_timeout:g} s for {_nodes(missing)} (start_timeout)"
            self._on_event({"kind": "notice", "text": text})
        if self._may_begin_without(missing):
            self._lost.clear()
        for rank, (name, deadline) in list(self._lost.items()):
            if now > deadline:
                self._finish(f"{name} did not come back within {self._node_timeout:g} s (node_timeout)", rank)

    def send(self, message: Mapping[str, Any], *ranks: int) -> None:
        """Send a message to the nodes `ranks`, as far as they are connected."""
        for rank in ranks:
            member = self.members.get(rank)
            if member is not None and member.connection is not None:
                # Reading also fails, but only after the messages that the node sent before.
                with contextlib.suppress(OSError):
                    member.connection.send(**message)

    # ------------------------------------------------------------------ state of the run

    @property
    def has_begun(self) -> bool:
        """Return whether the first round has begun."""
        return self._round > 0

    def takes_part(self, rank: int) -> bool:
        """Return whether the launcher that has this rank takes part in this round. A launcher that joined later does not."""
        return rank in self.members and self._taking_part.get(rank) == self.members[rank].id

    def may_go(self, rank: int) -> bool:
        """Return whether the launcher of a node may end: its workers have ended, it leaves, or the run has ended."""
        return rank in self._done or rank in self._leaving or self._end is not None

    @property
    def taken(self) -> set[int]:
        """The ranks that a node without a number cannot get."""
        return {*self.members, *self._done, *self._leaving}

    def nodes(self) -> dict[int, dict[str, Any]]:
        """Return the facts that each node of this round sent when it joined, by node rank, without the nodes that are lost."""
        return {rank: member.about for rank, member in self.members.items() if self.takes_part(rank)}

    # ------------------------------------------------------------------ decisions

    def _end_if_all_are_done(self) -> bool:
        """If the workers of all nodes of this round have ended, tell all nodes that the run has ended. Return whether they have."""
        if not self._taking_part.keys() <= self._done.keys() | self._leaving.keys():
            return False
        self._is_all_done = True
        self.send({"op": "all done"}, *self._taking_part)
        self.send(_TOO_LATE, *(self.members.keys() - self._taking_part.keys()))
        return True

    def _record_failure(self, rank: int, failure: Any) -> None:
        """Show and record the failure of a worker of another node, each failure once."""
        if rank == 0 or not isinstance(failure, dict) or self._failures.get(rank) == failure:
            return
        self._failures[rank] = failure
        text = ": ".join(str(failure[name]) for name in ("cause", "then") if failure.get(name))
        self._on_event({"kind": "warning", "text": text})
        facts: dict[str, Any] = {name: str(failure[name]) for name in _FACTS if name in failure}
        facts |= {name: int(failure[name]) for name in _NUMBERS if name in failure}
        about = {"rank": int(failure["rank"]), "node": rank, "cause": str(failure["cause"]), **facts}
        self._record("worker_failed", float(failure["time"]), **about)

    def _may_begin_without(self, missing: Sequence[int]) -> bool:
        """Return whether the run may go on without the nodes `missing`."""
        return self._num_nodes - len(missing) >= self._min_nodes

    def _wants_another_round(self) -> bool:
        """Return whether a node of this round waits for another round. Nodes that joined later do not count."""
        return any(member.wants for rank, member in self.members.items() if self.takes_part(rank))

    def _is_complete(self) -> bool:
        """Return whether a round can begin. After the first round, nodes that joined later are not waited for."""
        awaited = [member for rank, member in self.members.items() if self.takes_part(rank) or not self._round]
        if self._leaving or not all(member.wants for member in awaited):
            return False
        ready = sum(member.wants for member in self.members.values())
        is_time = self._round > 0 or (self._last_call is not None and time.monotonic() > self._last_call)
        return ready == self._num_nodes or (ready >= self._min_nodes and is_time)

    def _begin_round_if_complete(self, *, is_regroup: bool = False) -> None:
        if self._end is not None:
            return
        if not self._is_complete() or (self._done and self._wants_another_round()):
            self._ask_for_a_round(is_regroup=is_regroup)
            return
        ranks = sorted(rank for rank, member in self.members.items() if member.wants)
        for rank in ranks:
            if self.members[rank].is_new:
                self.members[rank].is_new = False
                self._record("node_joined", node=rank, host=self.members[rank].name)
        self._round += 1
        self._taking_part = {rank: self.members[rank].id for rank in ranks}
        for member in self.members.values():
            member.wants, member.is_regroup, member.asked = False, False, ""
        nodes = [{name: value for name, value in self.members[rank].about.items() if name != "same"} for rank in ranks]
        self.send(
            {
                "op": "round", "number": self._round, "ranks": ranks, "nodes": nodes, "offer": self.members[0].offer,
                "has_lost": self._has_lost,
            },
            *ranks,
        )  # fmt: skip
        self._has_lost = False
        self._announce_newcomers()

    def _has_all(self) -> bool:
        """Return whether no node of this round is lost."""
        return all(self.takes_part(rank) or rank in self._leaving for rank in self._taking_part)

    def _announce_newcomers(self) -> None:
        """Let node 0 know how many nodes wait until its workers have saved."""
        waiting = sum(member.wants and not self.takes_part(rank) for rank, member in self.members.items())
        waiting = 0 if self._done else waiting  # once a node is done, no round begins for newcomers
        if waiting != self._num_waiting:
            self._num_waiting = waiting
            self.send({"op": "waiting", "count": waiting}, 0)

    def _ask_for_a_round(self, *, is_regroup: bool = False) -> None:
        """Ask the nodes to stop their workers and join the next round, because a node waits for it or is lost.

        If all workers have agreed to save and end (`is_regroup`), the nodes wait for the end of their workers instead.
        """
        if self._round == 0 or self._end is not None:
            return
        waiting = [member for rank, member in self.members.items() if member.wants and self.takes_part(rank)]
        if self._min_nodes < self._num_nodes and not waiting and not is_regroup and self._has_all():
            self._announce_newcomers()
            return
        if self._done and self._wants_another_round():
            self._finish_because_done()
            return
        is_soon = all(member.is_regroup for member in waiting) and self._has_all()
        when = "soon" if is_soon else "now"
        for rank, member in self.members.items():
            if not member.wants and member.asked not in (when, "now"):
                member.asked = when
                self.send({"op": "again", "when": when}, rank)

    def _let_go(self, rank: int) -> None:
        """Go on without a node that has left on SIGTERM."""
        member, how, _ = self._leaving.pop(rank)
        if rank in self.members and self.members[rank].id == member.id:
            del self.members[rank]
        self._go_on_without(rank, member, how, code=1, takes_part=True)

    def _go_on_without(self, rank: int, member: Member, how: str, *, code: int, takes_part: bool) -> None:
        name = f"node {rank} ({member.name})"
        if rank == 0:  # this server ends with it
            self._finish(f"{name} {how}", 0, code=code)
            return
        if takes_part:
            self._record("node_lost", node=rank, cause=f"{name} {how}")
            self._has_lost = True
            if member.is_regroup and self._taking_part.get(rank) == member.id:  # it has left, and all workers know
                del self._taking_part[rank]
        if takes_part and self._is_trained and self._min_nodes < self._num_nodes:
            self.send({"op": "gone", "rank": rank, "node": name, "how": how}, *self.members)
            self._taking_part.pop(rank, None)  # the workers have trained to the end together
            self._end_if_all_are_done()
        elif takes_part and self._done and self._min_nodes < self._num_nodes:
            done = next(iter(self._done.values()))[0]
            self._finish(
                f"{name} {how}, and the run cannot go on without it: {done}, and the workers there cannot be started again",
                rank,
                code=code,
            )
        elif len(self.members) >= self._min_nodes and self._round:
            if takes_part:
                self.send({"op": "gone", "rank": rank, "node": name, "how": how}, *self.members)
            self._begin_round_if_complete(is_regroup=takes_part and member.is_regroup)
        else:
            if self._round:
                self._lost[rank] = (name, time.monotonic() + self._node_timeout)
                self.send({"op": "lost", "node": name, "how": how, "seconds": self._node_timeout}, *self.members)
            self._ask_for_a_round()

    def _finish_because_done(self) -> None:
        """End the run, because workers that have already ended are needed again."""
        rank, (how, code) = next(iter(self._done.items()))
        self._finish(f"{how}, so the workers of the other nodes cannot be restarted", rank, code=code)

    def _finish(self, why: str, rank: int, code: int = 1, but: int | None = None) -> None:
        """End the run on every node except `but`."""
        if self._end is None:
            self._end = {"op": "end", "why": why, "rank": rank, "code": code}
            self.send(self._end, *(each for each in self.members if each != but))
