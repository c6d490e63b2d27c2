"""Where Horovod's workers find each other, and where a store of ours beside them listens."""

from __future__ import annotations

import errno
import socket
import types
from typing import Any

import pytest

from distributed.backends import make_backend
from distributed.backends._horovod import world
from distributed.backends._horovod.rendezvous import Rendezvous
from distributed.config.merging import Overrides, merge
from distributed.config.plan import plan_processes
from distributed.errors import ConfigError, ResourceError
from distributed.launching import listening
from distributed.state import WorkerContext
from tests.conftest import needs_backend


def made(**settings: Any) -> Any:
    merged = merge(Overrides(flag={"backend": "horovod", "nproc_per_node": 2, "device": "cpu", **settings}), {})
    return make_backend(merged, plan_processes(merged.config))


def test_an_ipv6_address_is_refused_where_horovods_workers_would_look_for_it() -> None:
    needs_backend("horovod")
    with pytest.raises(ConfigError, match=r"master_addr='fd00::1' .* on several nodes .* give its IPv4 address"):
        made(num_nodes=2, master_addr="fd00::1", master_port=29500)
    made(master_addr="fd00::1")
    made(num_nodes=2, master_addr="node0", master_port=29500)


def test_it_serves_at_the_ipv4_address_of_a_name_that_has_both(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_backend("horovod")

    def both(host: str, port: int, family: int = 0, kind: int = 0) -> list[Any]:
        found = [
            (socket.AF_INET6, kind, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, kind, 6, "", ("127.0.0.1", port)),
        ]
        return [each for each in found if family in (0, each[0])]

    monkeypatch.setattr(listening.socket, "getaddrinfo", both)
    server = Rendezvous()
    port = server.open("localhost", is_alone=True)
    monkeypatch.undo()
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        server.close()


def test_a_host_without_an_ipv4_address_is_said() -> None:
    needs_backend("horovod")
    with pytest.raises(ResourceError, match="over IPv4, and '::1' has no IPv4 address"):
        Rendezvous().open("::1", is_alone=False)


def test_the_store_beside_a_foreign_launcher_listens_at_the_node_of_rank_0_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under mpirun and horovodrun on several nodes, where each rank is told of it through Horovod."""
    monkeypatch.setattr(world.os, "uname", lambda: types.SimpleNamespace(nodename="127.0.0.1"))
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)
    first, second = World(0), World(1)
    said: list[str] = []
    store = first._open_store(said.append)
    host, port = second.told = first.told
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED
    store.set("key", "value")
    assert host == "127.0.0.1" and second._open_store(said.append).get("key") == b"value"
    assert len(said) == 1 and f"rendezvous at 127.0.0.1:{port} without a secret" in said[0]


class World(world.HorovodWorld):
    """One rank of two, on a node of its own."""

    def __init__(self, rank: int) -> None:
        self.context = WorkerContext(rank, 2, 0, 1, rank, "cpu")
        self._hvd = types.SimpleNamespace(cross_size=lambda: 2)
        self.told: Any = None

    def broadcast(self, value: Any, src: int = 0) -> Any:
        self.told = value if self.context.rank == src else self.told
        return self.told
