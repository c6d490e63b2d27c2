"""Workers of several nodes listen at the interface that leads to the others, also if the host name leads elsewhere."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.errors import ResourceError
from distributed.launcher import start
from distributed.launching import listening, nodes
from distributed.launching.nodes import Node, are_one_machine, interface_environ, interface_of, this_node
from tests.conftest import needs_backend

FIRST = Node("node0", "127.0.1.1", "10.99.0.1")
SECOND = Node("node1", "127.0.0.1", "10.99.0.2")
INTERFACES = [
    ("lo", "127.0.0.1"),
    ("eth0", "192.0.2.7"),
    ("eth1", "10.99.0.1"),
    ("eth1", "10.99.0.3"),
    ("eth1", "fd00::1"),
]

BOTH = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1"}


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is the first node: eth1 leads to the others, and eth0 elsewhere."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(nodes, "_addresses", lambda: iter(INTERFACES))
    monkeypatch.setattr(nodes, "loopback_interface", lambda: "lo")


@pytest.mark.parametrize("listens_at", ["127.0.0.1", "127.0.1.1", "::1", None])
@pytest.mark.parametrize("address", ["10.99.0.1", "10.99.0.3", "fd00::1"])
def test_a_host_name_that_leads_nowhere_gives_way_to_the_interface_on_the_route(
    listens_at: str | None, address: str
) -> None:
    assert interface_environ([Node("node0", listens_at, address), SECOND], 0) == BOTH


@pytest.mark.parametrize("listens_at", ["10.99.0.1", "10.99.0.3"])
def test_a_host_name_that_leads_to_the_interface_on_the_route_stays(listens_at: str) -> None:
    assert interface_environ([Node("node0", listens_at, "10.99.0.1"), SECOND], 0) == {}


def test_a_host_name_in_another_network_gives_way_to_the_interface_on_the_route() -> None:
    assert interface_environ([Node("node0", "192.0.2.7", "10.99.0.1"), SECOND], 0) == BOTH


def test_the_interface_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_environ([FIRST, SECOND], 0) == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "ib0"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert interface_environ([FIRST, SECOND], 0) == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.99.0.1", None])
def test_nodes_on_one_machine_stay_on_loopback(address: str | None) -> None:
    both = [Node("vm", "127.0.0.1", address)] * 2
    assert are_one_machine(both) and interface_environ(both, 0) == interface_environ(both, 1) == {}


def test_a_master_that_is_loopback_on_node_0_only_is_reached_on_the_way_to_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with --master-addr node0, where /etc/hosts of node 0 has the line of Debian's installer."""
    asked: list[str] = []
    monkeypatch.setattr(nodes, "reachable_address", lambda target: asked.append(target) or "10.99.0.1")
    assert interface_environ([Node("node0", "127.0.1.1", "127.0.1.1"), SECOND], 0) == BOTH
    assert asked == ["10.99.0.2"]


@pytest.mark.parametrize("address", ["127.0.1.1", "198.51.100.1", None])
def test_an_address_of_no_interface_but_loopback_sets_nothing(address: str | None) -> None:
    unknown = Node("node1", None, None)
    assert interface_environ([Node("node0", None, address), unknown], 0) == {}


def test_the_interfaces_of_this_machine_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert interface_of("127.0.0.1") == listening.loopback_interface()
    assert interface_of("198.51.100.1") is None
    assert interface_of("fe80::1%eth7") == "eth7"


def test_a_node_says_where_its_name_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the first address that this machine has, as for gloo."""
    stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    answers: Any = [(*stream, ("198.51.100.1", 0)), (*stream, ("127.0.1.1", 0))]
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: "node0")
    monkeypatch.setattr(nodes, "reachable_address", lambda target: {"node9": "10.99.0.1"}[target])
    monkeypatch.setattr(nodes.socket, "getaddrinfo", lambda name, *_, **__: answers if name == "node0" else [])
    assert this_node("node9") == FIRST
    answers.pop()
    assert this_node("node9") == Node("node0", None, "10.99.0.1")


def test_horovod_refuses_nodes_whose_names_do_not_lead_to_them() -> None:
    needs_backend("horovod")
    from distributed.backends._horovod.rendezvous import Rendezvous

    reached = Node("node0", "10.99.0.1", "10.99.0.1")
    Rendezvous.check([reached, Node("node1", "10.99.0.2", "10.99.0.2")])
    Rendezvous.check([Node("vm", "127.0.0.1", "127.0.0.1")] * 2)
    with pytest.raises(
        ResourceError, match=r": 'node1' resolves to 127.0.0.1 on node 1. .* by '10.99.0.2 node1' on node 1$"
    ):
        Rendezvous.check([reached, SECOND])
    with pytest.raises(
        ResourceError, match=r"none of its addresses on node 0, .* on node 1. .* by 'ADDRESS node0' on node 0, "
    ):
        Rendezvous.check([Node("node0", None, "127.0.1.1"), SECOND])


@pytest.mark.parametrize("content", [{"address": 1}, {"listens_at": ["a"]}, {"name": "a", "address": {}}])
def test_what_is_not_a_node_is_refused(content):
    with pytest.raises(TypeError):
        Node.of(content)


def test_a_node_is_read_as_it_was_written():
    for node in (Node("a", None, None), Node("b", "127.0.1.1", "10.0.0.2")):
        assert Node.of(node.to_dict()) == node


def test_a_name_that_appears_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [socket.gaierror(socket.EAI_NONAME, "unknown"), socket.gaierror(socket.EAI_AGAIN, "later"), None]
    asked, said = [], []

    def resolve(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if error := answers.pop(0):
            raise error
        return []

    monkeypatch.setattr(nodes.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(nodes, "_RETRY_S", 0.0)
    assert nodes.wait_for_name("job-0.job", 30, said.append)
    assert asked == ["job-0.job"] * 3 and said == ["waiting for an address of node 0 (job-0.job)"]


def test_a_name_that_never_appears_is_given_up() -> None:
    assert not nodes.wait_for_name("no-such-host.invalid", 0, print)


@pytest.mark.parametrize("variable", ["JOB_COMPLETION_INDEX", "PET_NNODES"])
def test_only_a_pod_waits_for_the_name_of_node_0(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    request = SimpleNamespace(num_nodes=2, master_addr="no-such-host.invalid", start_timeout=0.0)
    for name in ("JOB_COMPLETION_INDEX", "PET_NNODES"):
        monkeypatch.delenv(name, raising=False)
    start._wait_for_name(request)

    monkeypatch.setenv(variable, "0")
    with pytest.raises(
        ResourceError,
        match=r"^master_addr='no-such-host\.invalid' did not resolve to an address within 0 s \(start_timeout\)",
    ):
        start._wait_for_name(request)
    start._wait_for_name(SimpleNamespace(num_nodes=1))
