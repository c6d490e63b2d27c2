"""Reports and requests between the launchers of several nodes, without sockets."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from distributed.launching import node_reports
from distributed.launching.causes import Failure
from distributed.launching.heartbeat import NUM_VALUES, Board, Heartbeat, Phase
from distributed.launching.node_link import Round
from distributed.launching.node_reports import NodeReports
from tests.conftest import poll

ZEROS, PIDS = [0] * NUM_VALUES, dict.fromkeys(range(4), 0)
ANSWER = {
    "op": "answer", "round": 1, "rank": 2, "number": 0, "loader": None, "values": ZEROS, "stacks": {"pid": 1, "stacks": ""},
}  # fmt: skip
LINE = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 3, in stands\n'


class Nodes:
    """Two nodes with two workers each. What one sends reaches the others at once, as long as it is connected."""

    def __init__(self) -> None:
        self.boards = [Board(2), Board(2)]
        self.cut: set[int] = set()  # the nodes that are not connected
        self.watched = [{0: 0, 1: 1}, {0: 2, 1: 3}]  # the workers of each node that are at work, by local rank
        self.all = [self.made(node) for node in (0, 1)]
        self.begin(1)

    def made(self, node: int) -> NodeReports:
        def send(op: str, patience_s: float = 0.0, **message: Any) -> None:
            message = {"op": op, **message}
            if node in self.cut:
                return
            if op in ("progress", "answer"):
                self.all[0].add(node, message)
            elif node == 0:
                for each in self.all:
                    each.obey(message)

        def ask() -> None:
            for index, fd in self.boards[node].stacks.items():
                os.write(fd, LINE.replace("stands", f"stands_{node}_{index}").encode())

        return NodeReports(node, 0.1, self.boards[node], lambda: self.watched[node], ask, send)

    def begin(self, number: int) -> None:
        for node, each in enumerate(self.all):
            each.begin(Round(number, [0, 1], [], None), {0: 2 * node, 1: 2 * node + 1})

    def report(self, now: float = 0.0) -> None:
        for each in self.all:
            each._next_report = now
            assert each.report(is_done=False) and not each.report(is_done=False)  # only twice a second


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    poll(lambda: not any(each._is_answering for each in made.all), 10, lambda: "a thread still answers")
    for board in made.boards:
        board.close()


def test_node_0_knows_the_progress_of_all_workers_by_their_ranks(nodes: Nodes) -> None:
    heartbeat = Heartbeat()
    heartbeat.attach(nodes.boards[1]._slot(1))
    with heartbeat.fit():
        heartbeat.begin(0, compiles=False, timeout_s=1.0)
        heartbeat.mark(Phase.CALLBACKS, 7)
        assert nodes.all[0].watched == frozenset()
        nodes.report()
        assert nodes.all[0].watched == {0, 1, 2, 3} and nodes.all[1].last_watched == {2, 3}
        at = nodes.all[0].workers.progress(3)
    assert (at.step, at.phase, at.pid) == (7, Phase.CALLBACKS, os.getpid())
    assert nodes.all[0].workers.progress(2).step == 0


def test_nobody_is_watched_while_a_node_is_silent_or_stops_its_workers(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.report()
    assert len(nodes.all[0].watched) == 4
    nodes.all[1]._next_report = 0.0
    nodes.watched[1] = {}  # the workers of node 1 are being stopped
    nodes.all[1].report(is_done=False)
    assert not nodes.all[0].watched
    nodes.watched[1] = {0: 2, 1: 3}
    nodes.report()
    clock = node_reports.time.monotonic() + 10
    monkeypatch.setattr(node_reports.time, "monotonic", lambda: clock)
    assert not nodes.all[0].watched
    nodes.cut = {1}
    nodes.report()
    assert not nodes.all[0].watched and nodes.all[0].last_watched == {0, 1, 2, 3}
    nodes.cut = set()
    nodes.report()
    assert len(nodes.all[0].watched) == 4
    nodes.begin(2)
    assert not nodes.all[0].watched


def test_the_workers_of_a_node_that_is_done_do_not_count(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in (0, 1):
        nodes.begin(2 + node)
        nodes.report()
        nodes.all[node]._next_report = 0.0
        at_work, nodes.watched[node] = nodes.watched[node], {}
        nodes.all[node].report(is_done=True)
        clock = node_reports.time.monotonic() + 10.0
        monkeypatch.setattr(node_reports.time, "monotonic", lambda clock=clock: clock)
        other = nodes.all[1 - node]
        assert other.report(is_done=False)
        assert nodes.all[0].watched == {2 - 2 * node, 3 - 2 * node}
        nodes.watched[node] = at_work


def test_node_0_gets_the_stacks_of_all_workers(nodes: Nodes) -> None:
    nodes.report()
    found = nodes.all[0].inspect(PIDS, lambda: False)
    assert [found[rank].process.stacks.split()[-1] for rank in range(4)] == [
        "stands_0_0", "stands_0_1", "stands_1_0", "stands_1_1",
    ]  # fmt: skip


def test_stacks_are_not_known_if_a_node_is_silent_or_they_are_not_wanted_any_more(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.report()
    nodes.cut = {1}
    assert nodes.all[0].inspect(PIDS, lambda: True) == {}
    monkeypatch.setattr("distributed.launching.worker_reports._ANSWER_S", 0.5)
    found = nodes.all[0].inspect(PIDS, lambda: False)  # node 1 has reported just now, but does not answer
    assert [worker.process.why for worker in found.values()][2:] == [", its launcher does not answer"] * 2
    assert [worker.process.was_asked for worker in found.values()] == [True, True, False, False]
    assert found[1].process.stacks
    clock = node_reports.time.monotonic() + 10
    monkeypatch.setattr(node_reports.time, "monotonic", lambda: clock)
    assert nodes.all[0].inspect(dict.fromkeys(range(2), 0), lambda: False) == {}
    begins = threading.Timer(0.1, nodes.begin, [2])
    monkeypatch.setattr("distributed.launching.worker_reports._ANSWER_S", 600.0)
    begins.start()
    assert nodes.all[0].inspect(PIDS, lambda: False) == {}
    begins.join()


def test_a_node_that_is_asked_again_while_it_answers_answers_the_newest_request(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.report()
    one, own_stacks, asked, is_answering = nodes.all[1], nodes.all[1].own_stacks, list[str](), threading.Event()

    def slowly(ranks: Any) -> Any:
        asked.append(threading.current_thread().name)
        if len(asked) == 1:
            is_answering.set()
            poll(lambda: one._asked == (1, 2), 10, lambda: "nobody asks again")
        return own_stacks(ranks)

    monkeypatch.setattr(one, "own_stacks", slowly)
    nodes.all[0].workers._number = 1  # so that the next request has the number 2
    one.obey({"op": "stacks", "round": 1, "number": 1})
    assert is_answering.wait(10)
    found = nodes.all[0].inspect(PIDS, lambda: False)
    assert [worker.process.was_asked for worker in found.values()] == [True] * 4
    poll(lambda: not one._is_answering, 10, lambda: "it still answers")
    assert len(asked) == 2
    one.obey({"op": "stacks", "round": 2, "number": 3})  # of another attempt
    assert not one._is_answering


def test_an_attempt_that_begins_while_a_node_collects_stacks_is_not_asked_for_them(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, own_stacks, asked = nodes.all[1], nodes.all[1].own_stacks, list[Any]()

    def slowly(ranks: Any) -> Any:
        asked.append(ranks)
        found = own_stacks(ranks)
        nodes.begin(2)
        return found

    monkeypatch.setattr(one, "own_stacks", slowly)
    one.obey({"op": "stacks", "round": 1, "number": 1})
    poll(lambda: not one._is_answering, 10, lambda: "it still answers")
    assert asked == [{0: 2, 1: 3}]


def test_a_worker_that_has_failed_meanwhile_is_not_said_to_be_silent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.report()
    one, own_stacks = nodes.all[1], nodes.all[1].own_stacks

    def slowly(ranks: Any) -> Any:
        found = own_stacks(ranks)
        nodes.watched[1] = {1: 3}
        return found

    monkeypatch.setattr(one, "own_stacks", slowly)
    monkeypatch.setattr("distributed.launching.worker_reports._ANSWER_S", 0.5)
    found = nodes.all[0].inspect(PIDS, lambda: False)
    assert [worker.process.was_asked for worker in found.values()] == [True, True, False, True]


def test_nobody_waits_for_the_stacks_of_a_worker_that_has_ended(nodes: Nodes) -> None:
    nodes.report()
    nodes.cut = {1}
    ended = threading.Timer(0.1, nodes.all[0].add, [1, {"op": "progress", "round": 1, "workers": {}, "done": False}])
    ended.start()
    assert nodes.all[0].inspect(PIDS, lambda: False) == {}  # else it takes 30 s
    ended.join()


def test_a_node_that_is_gone_does_not_count(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.report()
    clock = node_reports.time.monotonic() + 10.0
    monkeypatch.setattr(node_reports.time, "monotonic", lambda: clock)
    assert not nodes.all[0].watched
    nodes.all[0].obey({"op": "gone", "rank": 1, "node": "node 1 (b)", "how": "has ended"})
    assert nodes.all[0].watched == {0, 1}


def test_the_node_of_a_worker_that_hangs_learns_what_node_0_found(nodes: Nodes) -> None:
    hang = Failure(
        2, "hang", 5.0, message="rank 2 hangs", reached=(1, 8), phase="training", location="train.py, line 3"
    )
    nodes.all[0].blame(hang)
    assert nodes.all[0].take_hang() is None
    found = nodes.all[1].take_hang()
    assert found is not None and dataclasses.replace(found, time=5.0) == hang and nodes.all[1].take_hang() is None
    nodes.all[0].blame(hang)
    nodes.all[1].begin(Round(2, [0, 1], [], None), {0: 2, 1: 3})
    assert nodes.all[1].take_hang() is None  # it was of the attempt before
    nodes.all[0].blame(hang)
    assert nodes.all[1].take_hang() is None


@pytest.mark.parametrize(
    "message",
    [
        {"op": "progress", "round": 1, "workers": {"4": ZEROS}}, {"op": "progress", "round": 1, "workers": {"-1": ZEROS}},
        {"op": "progress", "round": 1, "workers": {"1": ZEROS}},  # a rank of node 0
        {"op": "progress", "round": 1, "workers": {"2": [-1, *ZEROS[1:]]}},
        {"op": "progress", "round": 1, "workers": {"x": ZEROS}}, {"op": "progress", "round": 1, "workers": {"2": [1.5] * NUM_VALUES}},
        {"op": "progress", "round": 1, "workers": [1]}, {"op": "progress", "round": 1}, {"op": "progress"},
        {**ANSWER, "rank": 9}, {**ANSWER, "rank": "2"}, {**ANSWER, "rank": 1}, {**ANSWER, "values": [-1] * NUM_VALUES},
        {**ANSWER, "values": None},
    ],
)  # fmt: skip
def test_what_no_launcher_sends_is_refused(nodes: Nodes, message: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        nodes.all[0].add(1, message)
    nodes.report()
    assert nodes.all[0].watched == {0, 1, 2, 3}


def test_reports_of_another_round_or_another_node_do_not_count(nodes: Nodes) -> None:
    values = [3, *ZEROS[1:]]
    nodes.all[0].add(1, {"op": "progress", "round": 2, "workers": {"2": values}})
    nodes.all[0].add(7, {"op": "progress", "round": 1, "workers": {"2": values}})
    nodes.all[0].add(1, {**ANSWER, "loader": 0})
    assert nodes.all[0].workers._loaders == {}  # nobody has asked
    assert nodes.all[0].workers.progress(2).beats == 0 and not nodes.all[0].watched
