"""Ranks find each other in a store that may hold what an earlier attempt left, and know who stayed away."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from distributed.backends._torch import rendezvous
from distributed.errors import ResourceError
from distributed.launching import nodes
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.nodes import Node


def join(store, ranks, world_size, seconds=5.0):
    """What each of `ranks` learns: (name, missing ranks); and what rank 0 said meanwhile."""
    said = []
    deadline = time.monotonic() + seconds

    def run(rank):
        if rank == 0:
            return rendezvous._wait_for_ranks(store, world_size, deadline, seconds, said.append)
        return rendezvous._announce(store, rank, deadline + 5)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks)), said


def test_every_attempt_has_a_name_of_its_own_that_all_ranks_know():
    store = dist.HashStore()
    names = []
    for _ in range(20):  # each finds the words and answers of all before it
        found, said = join(store, [0, 1, 2], 3)
        assert found[0] == found[1] == found[2] and found[0][1] == "" and said == []
        names.append(found[0][0])
    assert len(set(names)) == 20


def test_who_stays_away_is_named_while_waiting_and_when_time_is_up(monkeypatch):
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.05)
    store = dist.HashStore()
    join(store, [0, 1, 2, 3], 4)  # an earlier attempt, where all came

    found, said = join(store, [0, 2], 4, 0.3)

    assert [missing for _, missing in found] == ["1, 3", "1, 3"]
    assert said == ["waiting for ranks 1, 3 to call fit(), as every rank must (at most 0.3 s)"]


def test_without_rank_0_the_others_name_it():
    assert rendezvous._announce(dist.HashStore(), 1, time.monotonic() + 0.05)[1] == "0"


def test_a_rank_0_that_nobody_reaches_is_named_in_time_and_without_torchs_stack(monkeypatch, capfd):
    monkeypatch.setattr(rendezvous, "_WARN_AFTER_S", 0.05)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with socket.socket() as bound:  # does not listen
        bound.bind(("127.0.0.1", 0))
        place = WorkerEnvironment(1, 1, 2, 2, 0, "127.0.0.1", bound.getsockname()[1], 0, "TF_CONFIG")
        said, began = [], time.monotonic()
        with pytest.raises(ResourceError) as caught:
            rendezvous._connect(place, 0.4, said.append, "fit()")
    assert time.monotonic() - began < 5
    at = f"127.0.0.1:{place.master_port}: Connection refused"
    assert str(caught.value) == f"{rendezvous._missing_message('0', 0.4)} ({at})"
    assert said == [f"waiting for rank 0 at {at} (at most 0.4 s)"]
    assert capfd.readouterr() == ("", "")


def test_a_rank_0_that_comes_late_is_found():
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(rendezvous._await_listener, *later.getsockname(), 10.0, pytest.fail)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            later.listen()
            assert waiting.result(10.0) is None


@pytest.mark.parametrize(("listed", "text"), [("0", "rank 0"), ("1, 3", "ranks 1, 3")])
def test_the_error_says_who_and_how_long(listed, text):
    assert (
        rendezvous._missing_message(listed, 600)
        == f"{text} did not join within start_timeout=600 s: every rank must call fit()"
    )


def test_ranks_of_other_launchers_listen_on_the_interface_that_leads_to_the_other_nodes(monkeypatch):
    """Two ranks on each of two nodes whose own names are loopback addresses. On node 0 the name of the master is one too."""
    addresses = ["127.0.1.1", "127.0.1.1", "10.99.0.2", "10.99.0.2"]
    store, this, chosen = dist.HashStore(), threading.local(), {}

    def choose(rank):
        this.rank = rank
        place = WorkerEnvironment(rank, rank % 2, 4, 2, rank // 2, "node0", 29500, 0, "openmpi")
        rendezvous.choose_interface(store, place)

    def record(found, own):
        chosen[this.rank] = nodes.interface_environ(found, own)
        return {}

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous, "interface_environ", record)
    monkeypatch.setattr(rendezvous, "this_node", lambda addr: Node("node", "127.0.1.1", addresses[this.rank]))
    monkeypatch.setattr(nodes, "reachable_address", lambda target: {"10.99.0.2": "10.99.0.1"}[target])
    monkeypatch.setattr(nodes, "_addresses", lambda: iter([("eth0", "10.99.0.1"), ("eth1", "10.99.0.2")]))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(choose, range(4)))

    assert [chosen[rank]["GLOO_SOCKET_IFNAME"] for rank in range(4)] == ["eth0", "eth0", "eth1", "eth1"]
