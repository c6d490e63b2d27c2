"""Hangs on two nodes, as their agents find them, without workers and without sockets."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.launching import hang_check
from distributed.launching.heartbeat import Board, Heartbeat, Phase
from distributed.launching.node_link import Round
from distributed.launching.node_reports import NodeReports
from distributed.launching.progress_check import ProgressCheck
from distributed.launching.rendezvous import OneNode
from distributed.launching.request import LaunchRequest
from distributed.launching.verdicts import Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from tests.conftest import poll

STANDS = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 3 in evaluate\n'
PACKAGES = Path(pytest.__file__).parents[1]
WAITS = STANDS.replace("\n", f'\n  File "{PACKAGES}/torch/distributed/distributed_c10d.py", line 9 in all_gather\n', 1)


class Link(OneNode):
    """A connection of a node to the others."""

    def __init__(self, request: LaunchRequest, others: list[Link]) -> None:
        super().__init__(request)
        self.others, self.is_connected = others, True
        self.reports: Any = None

    def exchange(self, reports: NodeReports) -> None:
        self.reports = reports

    def send(self, op: str, patience_s: float = 0.0, **message: Any) -> None:
        if not self.is_connected:
            return
        if op in ("progress", "answer"):
            self.others[0].reports.add(self.request.node_rank, {"op": op, **message})
        else:
            for each in self.others:
                each.reports.obey({"op": op, **message})


class Nodes:
    """Two nodes with two workers each, and a clock that the test moves."""

    def __init__(self, directory: Path) -> None:
        self.stacks = STANDS
        self.now, self.links, self.boards = 0.0, list[Link](), list[Board]()
        self.checks, self.verdicts, self.hearts = list[ProgressCheck](), list[Verdicts](), list[Heartbeat]()
        for node in (0, 1):
            request = LaunchRequest(
                str(directory / f"node-{node}"),
                num_nodes=2,
                nproc_per_node=2,
                node_rank=node,
                hang_timeout=4.0,
                timeout_s=9.0,
            )
            link, board, display = Link(request, self.links), Board(2), Display(io.StringIO(), live=False)
            run = RunDirectory(Path(request.run_dir))
            verdicts = Verdicts(request, run, display)
            check = ProgressCheck(
                request, run, display, board, verdicts, link, lambda board=board: self.write(board), lambda rank: (f"node {rank // 2}", "")
            )  # fmt: skip
            self.links.append(link)
            self.boards.append(board)
            self.verdicts.append(verdicts)
            self.checks.append(check)
            for index in (0, 1):
                self.hearts.append(Heartbeat())
                self.hearts[-1].attach(board._slot(index))
        self.begin()

    def write(self, board: Board) -> None:
        """Let the workers of a node write their stacks."""
        for fd in board.stacks.values():
            os.write(fd, self.stacks.encode())

    def begin(self, number: int = 1) -> None:
        for node in (0, 1):
            ranks = {0: 2 * node, 1: 2 * node + 1}
            self.links[node].round = Round(number, [0, 1], [], None)
            self.verdicts[node].begin(ranks, 0)
            self.checks[node].begin(ranks)

    def mark(self, *steps: int) -> None:
        """Set the updates of the ranks."""
        for heart, step in zip(self.hearts, steps, strict=True):
            heart._beats = 10 * step
            heart._slot[4] = 1  # the number of the fit
            heart.mark(Phase.TRAINING, step)

    def stand(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            for check in reversed(self.checks):
                check.look()

    def end(self, node: int, status: int = 0) -> None:
        for index in (0, 1):
            self.verdicts[node].add({"op": "exit", "local_rank": index, "status": status, "time": 1.0})
        self.verdicts[node].judge(0)

    def fail(self, node: int, index: int) -> None:
        """Let a worker fail because it has waited for another one."""
        rank = 2 * node + index
        self.verdicts[node].add({
            "op": "event", "kind": "error", "rank": rank, "message": "Connection closed by peer", "type": "RuntimeError", "traceback": "",
            "exit_code": 1, "is_message_enough": False, "time": 5.0,
        })  # fmt: skip

    def blamed(self) -> list[str]:
        """Return what is known of the ranks that are blamed for a hang."""
        every = [rank.reported for each in self.verdicts for rank in each._ranks.values()]
        return [failure.message for failure in every if failure is not None and failure.kind == "hang"]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    monkeypatch.setattr(hang_check.time, "monotonic", lambda: made.now)
    yield made
    poll(lambda: not any(each.reports._is_answering for each in made.links), 10, lambda: "a thread still answers")
    for board in made.boards:
        board.close()


def test_the_node_of_the_rank_that_is_behind_learns_that_it_hangs(nodes: Nodes, tmp_path: Path) -> None:
    nodes.mark(9, 9, 9, 8)
    nodes.stand(4)
    assert nodes.blamed() == []
    nodes.stand(2)
    (said,) = nodes.blamed()
    assert said.startswith(
        "rank 3 on node 1 hangs in step 8 (training): no progress for 4 s (hang_timeout=4), it is at"
    )
    assert said.endswith(" on node 0") and nodes.verdicts[1]._ranks[1].reported is not None
    (directory,) = (tmp_path / "node-0" / "logs").glob("stacks-*")
    assert sorted(file.name for file in directory.iterdir()) == [f"rank-{rank}.txt" for rank in range(4)]


def test_a_rank_of_node_0_is_named_too(nodes: Nodes) -> None:
    nodes.mark(9, 8, 9, 9)
    nodes.stand(6)
    (said,) = nodes.blamed()
    assert said.startswith("rank 1 on node 0 hangs") and nodes.verdicts[0]._ranks[1].reported is not None


def test_nobody_is_blamed_while_a_node_is_silent(nodes: Nodes) -> None:
    nodes.mark(9, 9, 9, 8)
    nodes.stand(1)
    nodes.links[1].is_connected = False
    nodes.stand(60)
    assert nodes.blamed() == []
    nodes.links[1].is_connected = True
    nodes.stand(3.5)
    assert len(nodes.blamed()) == 1


@pytest.mark.parametrize("done", [0, 1])
def test_a_rank_hangs_after_all_workers_of_the_other_node_have_ended(nodes: Nodes, done: int) -> None:
    steps = [9, 9, 9, 9]
    steps[3 - 2 * done] = 8
    nodes.mark(*steps)
    nodes.stand(1)
    nodes.end(done)
    nodes.stand(6)
    (said,) = nodes.blamed()
    assert said.startswith(f"rank {3 - 2 * done} on node {1 - done} hangs in step 8")


def test_a_rank_that_has_ended_meanwhile_is_not_blamed(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.mark(9, 9, 9, 8)
    nodes.stand(4)
    blame = NodeReports.blame

    def late(self: NodeReports, hang: Any) -> None:
        nodes.verdicts[1].add({"op": "exit", "local_rank": 1, "status": -9, "time": 1.0})
        blame(self, hang)

    monkeypatch.setattr(NodeReports, "blame", late)
    nodes.stand(2)
    assert nodes.blamed() == []


def test_node_0_names_the_rank_of_another_node_for_which_its_own_have_waited(nodes: Nodes) -> None:
    nodes.mark(9, 9, 9, 8)
    nodes.hearts[3].mark(Phase.SAVING, 8, is_slow=True)  # so that it may take 40 s
    nodes.stand(9)
    nodes.fail(0, 0)
    nodes.fail(0, 1)
    found = nodes.checks[0].find_late()
    assert found is not None and (found.rank, found.node_rank) == (3, 1)
    assert found.message.startswith(
        "rank 3 on node 1 hangs in step 8 (saving a checkpoint): no progress for 8 s (timeout_s=9)"
    )


@pytest.mark.parametrize("joins", [False, True])
def test_node_0_names_no_rank_of_another_node_that_may_have_waited_itself(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Ranks 0 and 1 have failed, and rank 3 is about to. If node 1 `joins` the next round, it has ended rank 3 without a word."""
    nodes.mark(9, 9, 9, 9)
    for heart in nodes.hearts:
        heart.mark(Phase.SAVING, 9, is_slow=True)
    nodes.verdicts[1].add({"op": "exit", "local_rank": 0, "status": 0, "time": 1.0})
    nodes.stand(9)
    nodes.fail(0, 0)
    nodes.fail(0, 1)
    nodes.stacks = WAITS
    monkeypatch.setattr(Link, "num_nodes_waiting", lambda self: int(joins))
    assert nodes.checks[0].find_late() is None


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_goes_on_while_the_stacks_are_read_is_not_blamed(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    nodes.mark(*(8 if each == rank else 9 for each in range(4)))
    write = nodes.write

    def late(board: Board) -> None:
        nodes.hearts[rank].mark(Phase.CALLBACKS, 8)
        write(board)

    monkeypatch.setattr(nodes, "write", late)
    nodes.stand(6)
    assert nodes.blamed() == []


def test_another_node_names_its_own_rank_for_which_others_have_waited(nodes: Nodes, tmp_path: Path) -> None:
    nodes.mark(9, 9, 9, 8)
    nodes.hearts[3].mark(Phase.SAVING, 8, is_slow=True)
    nodes.stand(9)
    nodes.fail(1, 0)
    found = nodes.checks[1].find_late()
    assert found is not None and (found.rank, found.node_rank) == (3, None)
    assert found.message.endswith(" on node 1") and len(list((tmp_path / "node-1" / "logs").glob("stacks-*"))) == 1
    nodes.fail(1, 1)
    assert nodes.checks[1].find_late() is None
