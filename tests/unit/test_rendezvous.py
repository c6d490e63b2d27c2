"""The agents' rendezvous: one node needs no socket at all, and several nodes join through the server of node 0."""

from __future__ import annotations

import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from distributed.errors import ResourceError
from distributed.launching import agent, rendezvous
from distributed.launching.heartbeat import Board
from distributed.launching.node_link import NodesEndedError, Round
from distributed.launching.rendezvous import ManyNodes, OneNode, nodes_of, rendezvous_of
from distributed.launching.request import LaunchRequest
from distributed.runs.directory import RunDirectory
from tests.conftest import free_port

SECRET = "0123456789abcdef" * 2


def requests(count: int, **more: Any) -> list[LaunchRequest]:
    """Return the requests of `count` nodes. Only node 0 names a run directory."""
    port = free_port()
    return [
        LaunchRequest(
            "runs/a" if rank == 0 else "", num_nodes=count, node_rank=rank, master_addr="127.0.0.1", master_port=port, start_timeout=20.0,
            preload=(), **more,
        )
        for rank in range(count)
    ]  # fmt: skip


def silent(event: object) -> None:
    """Show nothing."""


def test_one_node_is_complete_at_once_and_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "TCPStore", None)
    monkeypatch.setattr(rendezvous, "listen_at", None)
    handler = rendezvous_of(LaunchRequest("run"), silent)
    handler.offer = lambda: "offer"
    found = handler.next_rendezvous()
    assert isinstance(handler, OneNode) and (found.rank, found.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    assert handler.round == Round(1, [], [], "offer")
    handler.next_rendezvous()
    assert handler.round.number == 2
    assert handler.shutdown() and handler.is_closed()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_three_nodes_join_and_agree_on_the_run(secret: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if secret is not None:
        monkeypatch.setenv("DISTRIBUTED_TOKEN", secret)
    with ThreadPoolExecutor(3) as pool:
        asked = [each if each.node_rank else dataclasses.replace(each, resume=True) for each in requests(3)]
        handlers = list(pool.map(lambda each: ManyNodes(each, silent), asked))
        handlers[0].offer = lambda: ["here", 5, None]
        found = list(pool.map(lambda each: each.next_rendezvous(), handlers))
        try:
            assert [(each.rank, each.world_size) for each in found] == [(0, 3), (1, 3), (2, 3)]
            assert [(each.request.run_dir, each.request.resume) for each in handlers] == [("runs/a", True)] * 3
            assert len({each.get_run_id() for each in handlers}) == 1
            assert all(each.round == handlers[0].round and each.round.offer == ["here", 5, None] for each in handlers)
            assert len(nodes_of(handlers[1].round)) == 3
        finally:
            list(pool.map(lambda each: each.finish("has finished", 1, waits=True), handlers))
            list(pool.map(lambda each: each.shutdown(), handlers))


def test_a_stop_ends_the_wait_for_other_nodes() -> None:
    (request, _) = requests(2)
    handler = ManyNodes(request, silent)
    handler.is_stopped = lambda: True
    try:
        with pytest.raises(RendezvousGracefulExitError):
            handler.next_rendezvous()
    finally:
        handler.shutdown()


def test_a_port_that_is_taken_is_named() -> None:
    (request, _) = requests(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", request.master_port or 0))
        taken.listen()
        with pytest.raises(
            ResourceError, match=rf"node 0 cannot listen at 127.0.0.1:{request.master_port} .*--master-port"
        ):
            ManyNodes(request, silent)


@pytest.mark.parametrize("is_own", [True, False])
def test_node_0_warns_if_the_others_look_for_it_on_another_machine(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    (request, _) = requests(2)
    shown: list[Any] = []
    monkeypatch.setattr(rendezvous, "is_own_host", lambda host: is_own)
    ManyNodes(request, shown.append).shutdown()
    warned = [event["text"] for event in shown if event["kind"] == "warning"]
    assert [text.startswith("this is node 0, and 127.0.0.1 (master_addr) is no address") for text in warned] == [
        True
    ] * (not is_own)


@pytest.mark.parametrize("content", [{"name": "a", "listens_at": 5}, {"name": "a", "address": []}])
def test_a_node_that_describes_itself_in_another_form_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        nodes_of(Round(1, [0], [content], None))


def test_the_end_of_another_node_is_the_last_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any) -> int:
        raise NodesEndedError("node 0 (10.0.0.1) is lost: its launcher has ended", 0, 3)

    monkeypatch.setattr(agent, "_run_to_the_end", lost)
    ours, other = socket.socketpair()
    with ours, other:
        request = LaunchRequest(str(tmp_path), num_nodes=2, node_rank=1, master_addr="node0", master_port=29500)
        assert agent.run_agent(request, ours, Board(1)) == 3
    said = "".join(capfd.readouterr())
    assert said.splitlines()[-1] == "error: node 0 (10.0.0.1) is lost: its launcher has ended"


def test_an_event_of_another_node_is_written_once_also_in_a_shared_directory(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path))
    run.event("worker_failed", time=2.5, rank=1, cause="killed", node=1)  # by node 1

    rendezvous._record(run, "worker_failed", 2.5, rank=1, cause="killed", node=1)
    rendezvous._record(run, "worker_failed", 7.5, rank=1, cause="killed", node=1)
    rendezvous._record(run, "node_lost", node=1, cause="has ended")

    assert [event["event"] for event in run.read_events()] == ["worker_failed", "worker_failed", "node_lost"]


def test_the_server_of_another_run_refuses_a_node(tmp_path: Path) -> None:
    """Its first command found the port taken, and is taken for one more node."""
    for name, text in (("a", "print(1)"), ("b", "print(2)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(text)
    zero, one = requests(2)
    zero = dataclasses.replace(zero, script=str(tmp_path / "a" / "train.py"))
    one = dataclasses.replace(one, script=str(tmp_path / "b" / "train.py"), asks_for_rank=True)
    handler = ManyNodes(zero, silent)
    try:
        with pytest.raises(
            NodesEndedError,
            match=r"differs from node 0: script train.py \(\w{8}\) there and train.py \(\w{8}\) on node 0",
        ):
            ManyNodes(one, silent)
    finally:
        handler.shutdown()


def test_the_engine_checks_a_newcomer_under_its_node_rank() -> None:
    seen: list[list[str]] = []

    class Engine:
        def check(self, nodes: Any) -> None:
            seen.append([node.name for node in nodes])
            raise ResourceError("'node2' cannot be reached")

    about = {"name": "node0", "listens_at": "10.0.0.1", "address": "10.0.0.1"}
    nodes = {0: about, 2: {**about, "name": "node2"}}
    assert rendezvous._objection(Engine(), nodes) == "'node2' cannot be reached"  # type: ignore[arg-type]
    assert seen == [["node0", "", "node2"]]
    assert rendezvous._objection(None, nodes) is None
