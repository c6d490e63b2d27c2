"""The server of node 0 and the links of all nodes: joining, rounds, lost nodes, replacements, refusals. No framework, no workers."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from distributed.launching import node_link, node_rounds, node_server
from distributed.launching.listening import listen_at
from distributed.launching.node_link import NodeLink, NodesEndedError, Round
from distributed.launching.node_server import NodeServer
from distributed.launching.seal import Seal, SealedConnection
from tests.unit.test_listening import needs_ipv6

SECRET = "0123456789abcdef"
LARGE = "x" * 1_000_000  # several of them are more than a socket takes at once


def about(name: str, **same: Any) -> dict[str, Any]:
    return {"name": name, "address": None, "same": {"num_nodes": 3, "torch": "2.13.0", **same}}


class Nodes:
    """Three nodes of a run, or as many as the test starts."""

    def __init__(
        self,
        num_nodes: int = 3,
        secret: str = SECRET,
        start_timeout: float = 20.0,
        node_timeout: float = 20.0,
        host: str = "127.0.0.1",
        min_nodes: int | None = None,
        port: int = 0,
        check: node_server.Check = lambda _: None,
    ) -> None:
        self.num_nodes, self.secret, self.node_timeout = num_nodes, secret, node_timeout
        bound = listen_at(host, port)
        self.where: tuple[str, int] = bound.getsockname()[:2]
        self.shown: list[str] = []
        welcome = {"run_dir": "runs/a", "run_id": uuid.uuid4().hex}
        self.recorded: list[dict[str, Any]] = []
        self.reported: list[tuple[int, Mapping[str, Any]]] = []
        self.server = NodeServer(
            bound, secret, about("node0", num_nodes=num_nodes), welcome, start_timeout=start_timeout,
            node_timeout=node_timeout, min_nodes=min_nodes, on_event=self.show, check=check,
            record=lambda event, *time, **detail: self.recorded.append({"event": event, **detail}), report=self.report,
        )  # fmt: skip
        self.pool = ThreadPoolExecutor(8)
        self.links: list[NodeLink] = []
        self.zero = self.link(0, own=self.server.start())
        self.zero.connect(5)

    def show(self, event: Mapping[str, Any]) -> None:
        self.shown.append(f"{event['kind']}: {event['text']}")

    def report(self, node: int, message: Mapping[str, Any]) -> None:
        if "error" in message:
            raise ValueError(message["error"])
        self.reported.append((node, message))

    def link(
        self, rank: int | None, own: socket.socket | None = None, secret: str | None = None, **same: Any
    ) -> NodeLink:
        link = NodeLink(
            self.where, self.secret if secret is None else secret, rank, about(f"node{rank}", num_nodes=self.num_nodes, **same),
            node_timeout=self.node_timeout, on_event=self.show, own=own,
        )  # fmt: skip
        self.links.append(link)
        return link

    def connected(self, rank: int | None, **same: Any) -> NodeLink:
        link = self.link(rank, **same)
        assert link.connect(10)["run_dir"] == "runs/a"
        return link

    def join(self, *links: NodeLink, is_stopped: Callable[[], bool] = lambda: False) -> list[Future[Round | None]]:
        return [self.pool.submit(link.join, f"offer of {rank}", is_stopped) for rank, link in enumerate(links)]

    def begin(self, *links: NodeLink) -> None:
        """Let all nodes join a round, and wait until it has begun."""
        for future in self.join(*links):
            future.result(5)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.server.close(5)
        self.pool.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def build(*args: Any, **options: Any) -> Nodes:
        made.append(Nodes(*args, **options))
        return made[-1]

    yield build
    for nodes in made:
        nodes.close()


def until(is_true: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("secret", "host"), [("", "127.0.0.1"), (SECRET, "127.0.0.1"), pytest.param("", "::1", marks=needs_ipv6)]
)
def test_a_round_begins_when_all_nodes_have_joined_and_tells_them_what_node_0_offers(
    make: Callable[..., Nodes], secret: str, host: str
) -> None:
    nodes = make(3, secret, host=host)
    links = [nodes.zero, nodes.connected(2), nodes.connected(1)]
    first = nodes.join(*links[:2])
    time.sleep(0.3)
    assert not any(future.done() for future in first)

    rounds = [future.result(5) for future in [*first, *nodes.join(*links[2:])]]

    assert rounds[0] == rounds[1] == rounds[2] and rounds[0] is not None
    assert rounds[0].number == 1 and [node["name"] for node in rounds[0].nodes] == ["node0", "node1", "node2"]
    assert rounds[0].offer == "offer of 0"


def test_node_0_says_for_which_nodes_it_waits(make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rounds, "SHOWN_AFTER_S", 0.1)
    nodes = make(4)
    nodes.connected(2)
    until(lambda: any(line.startswith("notice: waiting ") for line in nodes.shown))
    (line,) = (line for line in nodes.shown if line.startswith("notice: waiting "))
    assert line.endswith(" s for nodes 1, 3 (start_timeout)")


def test_reports_of_all_nodes_reach_node_0_and_its_requests_reach_all(make: Callable[..., Nodes]) -> None:
    nodes, asked = make(3), dict[int, list[Any]]()
    links = [nodes.zero, nodes.connected(1), nodes.connected(2)]
    for rank, link in enumerate(links):
        link.on_request = asked.setdefault(rank, []).append
    nodes.begin(*links)
    for rank, link in enumerate(links):
        link.send("progress", round=1, text=LARGE * (rank > 0))
    links[1].send("hang", rank=0)  # only node 0 blames
    links[1].send("answer", number=7)
    until(lambda: len(nodes.reported) == 4)
    sizes = sorted((node, len(each.get("text", ""))) for node, each in nodes.reported)
    assert sizes == [(0, 0), (1, 0), (1, len(LARGE)), (2, len(LARGE))]
    links[0].send("stacks", number=7)
    links[0].send("hang", rank=2)
    until(lambda: all(len(each) == 2 for each in asked.values()))
    assert asked[0] == asked[1] == asked[2] == [{"op": "stacks", "number": 7}, {"op": "hang", "rank": 2}]


def test_the_last_message_of_a_node_arrives_after_a_large_one(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    for _ in range(9):  # more than a connection keeps
        one.send("answer", 10.0, text=LARGE)
    one.fail("rank 1 failed", 3)
    one.close()
    until(lambda: nodes.zero.ended is not None)
    assert str(nodes.zero.ended) == "rank 1 failed" and len(nodes.reported) == 9


def test_a_node_that_waits_for_the_others_goes_on_looking(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one, looked = nodes.connected(1), threading.Event()
    nodes.begin(nodes.zero, one)
    done = nodes.pool.submit(nodes.zero.finish, "has finished", 1, waits=True, meanwhile=looked.set)
    assert looked.wait(5) and not done.done()
    one.finish("has finished", 1, waits=False)
    done.result(5)


def test_a_report_that_cannot_be_breaks_the_connection_of_its_sender_alone(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    before = one._connection
    one.send("progress", error="ValueError")
    until(lambda: one._connection is not before and one._connection is not None)  # the link connects again
    assert nodes.reported == [] and nodes.zero.ended is None and one.ended is None


def test_a_node_that_wants_another_round_lets_the_others_know(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    assert not nodes.zero.is_round_wanted
    again = nodes.join(one)
    until(lambda: nodes.zero.is_round_wanted)
    numbers = [future.result(5).number for future in [*again, *nodes.join(nodes.zero)]]  # type: ignore[union-attr]
    assert numbers == [2, 2] and not nodes.zero.is_round_wanted


def cut(link: NodeLink) -> None:
    """End the launcher of a node as SIGKILL does: its connection closes, and it never comes back."""
    link._is_closed = True
    assert link._connection is not None
    link._connection.socket.shutdown(socket.SHUT_RDWR)


def test_a_killed_node_is_named_and_a_replacement_goes_on(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    begin = time.monotonic()
    cut(one)
    until(lambda: nodes.zero.is_round_wanted)
    assert time.monotonic() - begin < 6
    waiting = nodes.join(nodes.zero)
    until(lambda: any("node 1 (node1) has ended" in line and "waiting 20 s" in line for line in nodes.shown))

    replacement = nodes.connected(1)

    rounds = [future.result(5) for future in [*waiting, *nodes.join(replacement)]]
    assert rounds[0] == rounds[1] and rounds[0] is not None and rounds[0].number == 2
    assert any("node 1 (node1) has joined again" in line for line in nodes.shown)


def test_the_seconds_for_which_a_lost_node_is_waited_for_are_counted_down(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_link, "_COUNT_DOWN_S", 0.4)
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    cut(one)
    until(lambda: nodes.zero.is_round_wanted)
    waiting = nodes.join(nodes.zero)

    def left() -> list[int]:
        found = [
            re.search(r"^notice: waiting for node 1 \(node1\): (\d+) s left \(node_timeout\)$", line)
            for line in nodes.shown
        ]
        return [int(each[1]) for each in found if each is not None]

    until(lambda: len(set(left())) >= 3)
    assert left()[0] <= 20 and left() == sorted(left(), reverse=True)
    replacement = nodes.connected(1)
    assert all(future.result(5) is not None for future in [*waiting, *nodes.join(replacement)])


def test_a_node_that_does_not_come_back_ends_the_run_and_is_named(make: Callable[..., Nodes]) -> None:
    nodes = make(3, node_timeout=1.0)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    cut(two)
    until(lambda: nodes.zero.is_round_wanted and one.is_round_wanted)
    for future in nodes.join(nodes.zero, one):
        with pytest.raises(
            NodesEndedError, match=r"node 2 \(node2\) did not come back within 1 s \(node_timeout\)"
        ) as raised:
            future.result(10)
        assert raised.value.rank == 2


def test_a_node_that_never_comes_is_named(make: Callable[..., Nodes]) -> None:
    nodes = make(3, start_timeout=1.0)
    one = nodes.connected(1)
    for future in nodes.join(nodes.zero, one):
        with pytest.raises(NodesEndedError, match=r"node 2 did not join within 1 s \(start_timeout\)"):
            future.result(10)


def test_a_rank_given_twice_refuses_the_second_node_only(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    with pytest.raises(NodesEndedError, match=r"node_rank=1 is taken by node1: number each node differently"):
        nodes.link(1).connect(10)
    rounds = [future.result(5) for future in nodes.join(nodes.zero, one)]
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize(
    ("rank", "same", "text"),
    [
        (1, {"torch": "2.12.0"}, r"node 1 \(node1\) differs from node 0: torch 2.12.0 there and 2.13.0 on node 0"),
        (1, {"nproc_per_node": 2}, "nproc_per_node 2 there and is missing on node 0"),
        (2, {}, "node_rank=2 is not below num_nodes=2"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_and_both_sides_say_why(
    make: Callable[..., Nodes], rank: int, same: dict[str, Any], text: str
) -> None:
    nodes = make(2)
    with pytest.raises(NodesEndedError, match=text):
        nodes.link(rank, **same).connect(10)
    until(lambda: any(line.startswith(f"warning: node {rank} (node{rank}) was refused") for line in nodes.shown))
    one = nodes.connected(1)  # the right one may still come
    assert all(future.result(5) is not None for future in nodes.join(nodes.zero, one))


@pytest.mark.parametrize("secret", ["", SECRET[::-1]])
def test_another_secret_is_refused(make: Callable[..., Nodes], secret: str) -> None:
    nodes = make(2)
    with pytest.raises(NodesEndedError, match="set the same one on all nodes"):
        nodes.link(1, secret=secret).connect(10)


def test_node_0_that_is_not_there_is_named_with_its_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        where = taken.getsockname()
        link = NodeLink(where, "", 1, about("node1"), node_timeout=1.0, on_event=lambda _: None)
        with pytest.raises(
            NodesEndedError, match=rf"node 0 did not answer at 127.0.0.1:{where[1]} within 0.5 s .*refused.*master_port"
        ):
            link.connect(0.5)


def test_the_end_of_node_0_ends_the_others(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    nodes.zero.close()
    until(lambda: one.ended is not None, 10)
    assert "node 0 (node0) has ended" in str(one.ended)


def test_a_killed_node_0_ends_the_others(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    nodes.server._is_closed.set()
    until(lambda: one.ended is not None, 10)
    assert "node 0 (127.0.0.1) is lost: its launcher has ended" in str(one.ended)


def test_a_node_0_that_was_started_again_ends_the_others_whose_workers_wait_for_the_lost_one(
    make: Callable[..., Nodes],
) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    nodes.server._is_closed.set()  # as a killed launcher does: no link is told
    nodes.server._thread.join()
    make(2, port=nodes.where[1])

    until(lambda: one.ended is not None)
    assert str(one.ended).startswith("node 0 (127.0.0.1) is lost: another launcher has taken its place")
    assert one.ended.exit_code == 1


def test_a_failure_for_good_reaches_the_others_with_its_cause_and_code(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    one.fail("rank 1 raised ValueError: no", 1)
    until(lambda: nodes.zero.ended is not None and two.ended is not None)
    assert str(two.ended) == "rank 1 raised ValueError: no" and two.ended is not None and two.ended.rank == 1
    assert one.ended is None
    late = nodes.link(1)
    with contextlib.suppress(NodesEndedError):
        late.connect(5)
        until(lambda: late.ended is not None)


def test_all_nodes_wait_for_the_last_one_to_be_done(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    done = nodes.pool.submit(nodes.zero.finish, "has finished", 1, waits=True)
    time.sleep(0.3)
    assert not done.done()
    one.finish("has finished", 1, waits=True)
    done.result(5)


def test_a_node_that_has_left_after_its_end_counts_as_done(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    one.finish("has finished", 1, waits=False)
    one.close()
    done = nodes.pool.submit(nodes.zero.finish, "has finished", 1, waits=True)
    time.sleep(0.3)
    assert not done.done() and nodes.zero.ended is None
    two.finish("has finished", 1, waits=True)
    done.result(5)


def test_a_node_that_was_stopped_ends_the_others_if_they_need_it_again(make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    one.finish("was stopped by SIGINT", 130, waits=False)
    one.close()
    time.sleep(0.3)
    assert nodes.zero.ended is None
    waiting = nodes.join(nodes.zero)
    with pytest.raises(
        NodesEndedError, match=r"node 1 \(node1\) was stopped by SIGINT, so the workers of the other nodes"
    ) as caught:
        waiting[0].result(10)
    assert caught.value.exit_code == 130
    until(lambda: two.ended is not None)


def test_a_connection_that_breaks_is_made_again_and_nobody_restarts(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    for _ in range(3):
        before = one._connection
        assert before is not None
        before.socket.shutdown(socket.SHUT_RDWR)
        until(lambda: one._connection is not before and one._connection is not None)  # noqa: B023
        time.sleep(0.2)
    assert not nodes.zero.is_round_wanted and not one.is_round_wanted and one.ended is None
    rounds = [future.result(5) for future in nodes.join(nodes.zero, one)]
    assert rounds[0] == rounds[1] and rounds[0] is not None and rounds[0].number == 2


def test_a_silent_node_counts_as_lost_after_ten_seconds(
    make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "LOST_AFTER_S", 1.5)
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    with one._changed:  # nothing is sent from now on, and nothing closes
        until(lambda: nodes.zero.is_round_wanted)
    assert any("has been silent" in line for line in nodes.shown)


def test_messages_of_another_form_end_their_connection_only(make: Callable[..., Nodes]) -> None:
    nodes = make(2, "")
    for message in ({"op": "here"}, {"op": "here", "rank": "x", "id": 1, "about": 5}, {"op": []}, {"op": "join"}, {}):
        link = nodes.link(1)
        link._open(time.monotonic() + 5)
        assert link._connection is not None
        link._connection.send(**message)
    one = nodes.connected(1)
    assert all(future.result(5) is not None for future in nodes.join(nodes.zero, one))
    assert threading.active_count() < 30


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a broken connection count as a lost node, and the first round begin without the others, soon."""
    monkeypatch.setattr(node_server, "_RECONNECT_S", 0.5)
    monkeypatch.setattr(node_rounds, "_LAST_CALL_S", 0.5)
    monkeypatch.setattr(node_rounds, "_LEAVING_S", 0.5)


def ranks_of(futures: list[Future[Round | None]]) -> list[list[int]]:
    """Return the nodes that take part in the round that each node was told of."""
    rounds = [future.result(8) for future in futures]
    return [begun.ranks for begun in rounds if begun is not None]


def test_nodes_go_and_come_while_the_others_go_on(quick: None, make: Callable[..., Nodes]) -> None:
    nodes = make(3, min_nodes=1)
    one = nodes.connected(1)
    assert ranks_of(nodes.join(nodes.zero, one)) == [[0, 1]] * 2  # node 2 is not waited for

    cut(one)
    until(lambda: nodes.zero.is_round_wanted)
    assert ranks_of(nodes.join(nodes.zero)) == [[0]]
    assert "warning: node 1 (node1) has ended, or its connection broke: going on without it" in nodes.shown

    two = nodes.connected(2)
    newcomer = nodes.pool.submit(two.join, None, lambda: False)
    until(lambda: nodes.zero.num_newcomers == 1)
    assert not nodes.zero.is_round_wanted and not newcomer.done()  # it waits until node 0 has saved
    assert [each["event"] for each in nodes.recorded] == ["node_lost"]
    assert ranks_of([newcomer, *nodes.join(nodes.zero)]) == [[0, 2]] * 2
    until(lambda: nodes.zero.num_newcomers == 0)
    assert nodes.recorded[1:] == [{"event": "node_joined", "node": 2, "host": "node2"}]


def test_fewer_nodes_than_the_fewest_wait(quick: None, make: Callable[..., Nodes]) -> None:
    nodes = make(3, min_nodes=2, node_timeout=2.0)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    cut(two)
    until(lambda: nodes.zero.is_round_wanted)
    assert ranks_of(nodes.join(nodes.zero, one)) == [[0, 1]] * 2
    cut(one)
    until(lambda: nodes.zero.is_round_wanted)
    with pytest.raises(NodesEndedError, match=r"node 1 \(node1\) did not come back within 2 s \(node_timeout\)"):
        ranks_of(nodes.join(nodes.zero))


def test_a_node_that_comes_when_all_are_done_ends_without_an_error(quick: None, make: Callable[..., Nodes]) -> None:
    nodes = make(2, min_nodes=1)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    cut(one)
    until(lambda: nodes.zero.is_round_wanted)
    nodes.begin(nodes.zero)
    late = nodes.connected(1)
    newcomer = nodes.pool.submit(late.join, None, lambda: False)
    nodes.zero.finish("has finished", 1, waits=True)
    with pytest.raises(NodesEndedError, match="the run has ended before this node could take part") as raised:
        newcomer.result(5)
    assert raised.value.exit_code == 0


def test_node_0_numbers_the_nodes_that_have_no_number(quick: None, make: Callable[..., Nodes]) -> None:
    nodes = make(3)
    first, second = nodes.connected(None), nodes.connected(None)
    assert [first.welcome["rank"], second.welcome["rank"]] == [1, 2]
    nodes.begin(nodes.zero, first, second)
    with pytest.raises(NodesEndedError, match=r"all 3 nodes have joined already \(num_nodes\)"):
        nodes.connected(None)
    cut(first)
    until(lambda: nodes.zero.is_round_wanted)
    assert nodes.connected(None).welcome["rank"] == 1


def test_node_0_shows_and_records_the_failed_workers_of_the_others_once(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    failure = {"time": 1.5, "rank": 3, "node": 1, "cause": "rank 3 on node 1 (node1) was killed by signal 9 (SIGKILL)"}
    failure["then"] = "restarting (1 of 3)"
    for _ in range(2):  # in the second round nothing else has failed
        futures = [
            nodes.pool.submit(one.join, None, lambda: False, failure),
            nodes.pool.submit(nodes.zero.join, "offer", lambda: False, {**failure, "node": 0}),
        ]
        assert all(future.result(5) is not None for future in futures)

    del failure["time"]  # it only tells whether node 1 has written the event into the same journal
    assert nodes.recorded == [{"event": "worker_failed", **failure}]
    assert nodes.shown.count(f"warning: {failure['cause']}: restarting (1 of 3)") == 1


def waiting(nodes: Nodes, rank: int | None, number: int = 1) -> tuple[NodeLink, Future[Round | None], list[bool]]:
    """Return the link of a node that waits to join a run that has begun, its round, and a list that is filled to stop the wait."""
    link, stopped = nodes.connected(rank), list[bool]()
    newcomer = nodes.pool.submit(link.join, None, lambda: bool(stopped))
    until(lambda: nodes.zero.num_newcomers == number)
    return link, newcomer, stopped


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "failed"])
def test_a_newcomer_that_ends_before_it_takes_part_is_lost_alone(
    quick: None, make: Callable[..., Nodes], end: str
) -> None:
    nodes = make(3, min_nodes=1)
    one = nodes.connected(1)
    assert ranks_of(nodes.join(nodes.zero, one)) == [[0, 1]] * 2
    two, newcomer, stopped = waiting(nodes, 2)
    stopped.append(True)
    assert newcomer.result(5) is None
    if end == "SIGINT":
        two.finish("was stopped by SIGINT", 130, waits=False)
    elif end == "SIGTERM":
        two.leave("was stopped by SIGTERM", is_regroup=False)
    else:
        two.fail("no space is left on node 2", 1)
    until(lambda: nodes.zero.num_newcomers == 0)
    two.close()

    assert ranks_of(nodes.join(nodes.zero, one)) == [[0, 1]] * 2  # as after a failure of a worker
    assert nodes.zero.ended is None and nodes.recorded == []
    warning = "warning: node 2 (node2) cannot take part: no space is left on node 2"
    assert nodes.shown == ([warning] if end == "failed" else [])


def test_ctrl_c_before_the_first_round_lets_another_command_take_the_rank(make: Callable[..., Nodes]) -> None:
    nodes = make(2)
    one = nodes.connected(1)
    one.finish("was stopped by SIGINT", 130, waits=False)
    one.close()
    until(lambda: 1 not in nodes.server._members)
    again = nodes.connected(1)
    nodes.begin(nodes.zero, again)
    done = nodes.pool.submit(nodes.zero.finish, "has finished", 1, waits=True)
    time.sleep(0.3)
    assert not done.done()  # the one that was stopped is not taken for the other
    again.finish("has finished", 1, waits=True)
    done.result(5)


def test_node_0_that_is_stopped_before_the_first_round_ends_the_others_with_its_code(
    make: Callable[..., Nodes],
) -> None:
    nodes = make(3)
    one = nodes.connected(1)
    nodes.zero.finish("was stopped by SIGINT", 130, waits=False)
    until(lambda: one.ended is not None)
    assert one.ended is not None and (str(one.ended), one.ended.exit_code) == (
        "node 0 (node0) was stopped by SIGINT",
        130,
    )


def test_a_node_that_the_engine_cannot_connect_does_not_join_a_run_that_has_begun(
    quick: None, make: Callable[..., Nodes]
) -> None:
    asked: list[list[int]] = []

    def check(abouts: Mapping[int, Mapping[str, Any]]) -> str | None:
        asked.append(sorted(abouts))
        return "'node2' resolves to 127.0.1.1 on node 2" if 2 in abouts else None

    nodes = make(3, min_nodes=1, check=check)
    nodes.begin(nodes.zero, nodes.connected(1))
    with pytest.raises(NodesEndedError, match="'node2' resolves to"):
        nodes.link(2).connect(5)
    until(lambda: "warning: node 2 (node2) was refused: 'node2' resolves to 127.0.1.1 on node 2" in nodes.shown)
    assert asked == [[0, 1, 2]] and nodes.zero.ended is None and not nodes.zero.is_round_wanted


def test_no_node_waits_to_join_workers_that_have_ended(quick: None, make: Callable[..., Nodes]) -> None:
    nodes = make(3, min_nodes=1)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    _, newcomer, _ = waiting(nodes, 2)
    one.finish("has finished", 1, waits=False)
    until(lambda: nodes.zero.num_newcomers == 0)
    nodes.zero.finish("has finished", 1, waits=True)
    with pytest.raises(NodesEndedError, match="the run has ended before this node could take part"):
        newcomer.result(5)


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_node_that_is_lost_after_the_training_is_not_missed(
    quick: None, make: Callable[..., Nodes], is_trained: bool
) -> None:
    nodes = make(3, min_nodes=1)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    one.finish("has finished", 1, waits=False, is_trained=is_trained)
    cut(two)
    if is_trained:
        nodes.zero.finish("has finished", 1, waits=True, is_trained=True)
        assert nodes.zero.ended is None and not nodes.zero.is_round_wanted
        return
    # The workers of a script without a Trainer may have had more to do.
    until(lambda: nodes.zero.ended is not None)
    assert re.search(
        r"node 2 \(node2\) has ended, .*: node 1 \(node1\) has finished, and the workers there", str(nodes.zero.ended)
    )


@pytest.mark.parametrize("min_nodes", [1, None])
def test_a_node_that_is_done_does_not_wait_for_ever_for_one_that_is_lost(
    quick: None, make: Callable[..., Nodes], min_nodes: int | None
) -> None:
    """In an elastic run nothing can replace its work; with a fixed number of nodes, its replacement needs the others."""
    nodes = make(2, min_nodes=min_nodes)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    done = nodes.pool.submit(nodes.zero.finish, "has finished", 1, waits=True)
    until(lambda: nodes.server._rounds._done)
    cut(one)
    if min_nodes is None:
        with pytest.raises(NodesEndedError, match=r"node 0 \(node0\) has finished, so the workers of the other nodes"):
            ranks_of(nodes.join(nodes.connected(1)))
    done.result(5)
    assert nodes.zero.ended is not None and nodes.zero.ended.exit_code == 1


def test_all_of_a_large_message_arrives() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    sends = SealedConnection(here, Seal("", "there"), Seal("", "back"))
    reads = SealedConnection(there, Seal("", "back"), Seal("", "there"))
    sends.send(nodes=["x" * 1000] * 800)
    found = []
    while not found:
        sends.flush()
        found += reads.receive()
    assert found == [{"nodes": ["x" * 1000] * 800}] and not sends.num_unsent
    sends.close()
    reads.close()


def test_all_nodes_that_were_told_to_stop_end_without_a_word_of_lost_ones(
    quick: None, make: Callable[..., Nodes]
) -> None:
    nodes = make(3, min_nodes=1)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    for leaving in (one, two):
        leaving.leave("was stopped by SIGTERM", is_regroup=True)
        leaving.close()
    time.sleep(0.2)
    nodes.zero.finish("was stopped by SIGTERM", 143, waits=True)
    time.sleep(1.0)  # longer than a node that leaves is waited for
    assert nodes.shown == nodes.recorded == [] and not nodes.zero.is_round_wanted and nodes.zero.ended is None


@pytest.mark.parametrize("is_asked", [True, False])
def test_the_others_go_on_when_a_node_leaves(quick: None, make: Callable[..., Nodes], is_asked: bool) -> None:
    nodes = make(3, min_nodes=1)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    one.leave("was stopped by SIGTERM", is_regroup=False)
    one.close()
    if is_asked:  # their workers were not told
        until(lambda: nodes.zero.is_round_wanted and two.is_round_wanted)
    begun = [future.result(5) for future in nodes.join(nodes.zero, two)]
    assert [(each.ranks, each.has_lost) for each in begun if each is not None] == [([0, 2], True)] * 2
    assert nodes.shown.count("warning: node 1 (node1) was stopped by SIGTERM: going on without it") == 2
    begun = [future.result(5) for future in nodes.join(nodes.zero, two)]
    assert [each.has_lost for each in begun if each is not None] == [False] * 2


def test_a_newcomer_that_has_not_asked_for_the_round_does_not_hold_it_up(
    quick: None, make: Callable[..., Nodes]
) -> None:
    nodes = make(3, min_nodes=1)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    nodes.connected(2)
    assert ranks_of(nodes.join(nodes.zero, one)) == [[0, 1]] * 2


def test_a_lost_node_that_is_there_again_learns_that_the_others_went_on(
    quick: None, make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = make(3, min_nodes=1)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    cut(one)
    until(lambda: two.is_round_wanted)
    nodes.begin(nodes.zero, two)
    back = nodes.link(1)
    back._id = one._id
    back.connect(5)
    until(lambda: back.is_round_wanted)
    assert not nodes.zero.is_round_wanted


def test_a_new_node_gets_the_number_of_a_silent_one_last(
    quick: None, make: Callable[..., Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_server, "LOST_AFTER_S", 3.0)
    nodes = make(4, min_nodes=1)
    one, two = nodes.connected(1), nodes.connected(2)
    nodes.begin(nodes.zero, one, two)
    with one._changed:  # nothing is sent from now on, and nothing closes
        until(lambda: any("node 1 (node1) has been silent" in line for line in nodes.shown))
        cut(two)
        until(lambda: any("node 2 (node2) has ended" in line for line in nodes.shown))
        assert [nodes.connected(None).welcome["rank"] for _ in range(3)] == [3, 2, 1]


def test_a_node_without_a_number_names_the_program_that_has_taken_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "_ANSWER_S", 0.2)
    monkeypatch.setattr(node_link, "SHOWN_AFTER_S", 0.1)
    shown: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = taken.getsockname()
        link = NodeLink(
            where, "", None, about("node0"), node_timeout=1.0, on_event=lambda event: shown.append(event["text"])
        )
        begin = time.monotonic()
        with pytest.raises(
            NodesEndedError, match=rf"node 0 cannot listen at 127.0.0.1:{where[1]}, because another .* --master-port$"
        ):
            link.connect(60)
    assert time.monotonic() - begin < 10
    assert shown == [f"waiting 60 s for node 0 at 127.0.0.1:{where[1]}, which is this machine (start_timeout)"]


def test_nodes_whose_workers_save_for_a_regroup_are_not_told_to_stop_them(
    quick: None, make: Callable[..., Nodes]
) -> None:
    nodes = make(4, min_nodes=1)
    one, two, three = nodes.connected(1), nodes.connected(2), nodes.connected(3)
    nodes.begin(nodes.zero, one, two, three)
    one.leave("was stopped by SIGTERM", is_regroup=True)
    one.close()
    until(lambda: nodes.zero.is_regroup and two.is_regroup and three.is_regroup)
    first = nodes.pool.submit(two.join, None, lambda: False, is_regroup=True)
    time.sleep(0.5)
    assert not nodes.zero.is_round_wanted and not three.is_round_wanted
    cut(three)
    until(lambda: nodes.zero.is_round_wanted)  # it would wait for node 3
    assert ranks_of([first, *nodes.join(nodes.zero)]) == [[0, 2]] * 2
    cut(two)  # what has been said of the round before does not count
    until(lambda: nodes.zero.is_round_wanted)


def test_a_node_that_leaves_after_the_others_have_asked_for_the_round_does_not_hold_it_up(
    quick: None, make: Callable[..., Nodes]
) -> None:
    nodes = make(3, min_nodes=1)
    one = nodes.connected(1)
    nodes.begin(nodes.zero, one)
    joined = nodes.pool.submit(nodes.zero.join, "offer", lambda: False, is_regroup=True)
    until(lambda: one.is_regroup)
    one.leave("was stopped by SIGTERM", is_regroup=True)
    assert ranks_of([joined]) == [[0]]
