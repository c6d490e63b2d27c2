"""The agents' rendezvous: no pickle that came over a socket is read, and one node needs no socket at all."""

from __future__ import annotations

import base64
import datetime
import pickle
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from distributed.launching import agent, rendezvous
from distributed.launching.rendezvous import JsonBackend, OneNode, rendezvous_of, state_from_json, state_to_json
from distributed.launching.request import LaunchRequest
from distributed.runs.directory import RunDirectory

SECRET, OTHER = b"0123456789abcdef" * 2, b"fedcba9876543210" * 2


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return self.path.touch, ()


def full_state() -> _RendezvousState:
    state = _RendezvousState()
    first, second = _NodeDesc("héte", 1, 0), _NodeDesc("b", 22, 3)
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901, datetime.UTC)
    state.round, state.complete, state.deadline = 7, True, now
    state.participants, state.wait_list = {first: 0, second: 1}, {second}
    state.redundancy_list, state.last_heartbeats = {first}, {first: now, second: now}
    return state


def test_the_state_comes_back_whole() -> None:
    """Every attribute: a torch that keeps more of them would lose it here."""
    state = full_state()
    assert vars(state_from_json(state_to_json(state).encode())) == vars(state)
    assert vars(state).keys() == vars(_RendezvousState()).keys()


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_state_that_somebody_else_wrote_runs_nothing(secret: bytes | None, tmp_path: Path) -> None:
    store, marker = dist.HashStore(), tmp_path / "ran"
    backend = JsonBackend(store, secret)
    evil = pickle.dumps(Evil(marker))
    for content in (evil, base64.b64encode(evil), b"", b"{}", b"[" * 100_000, b'{"round": "x"}', b"\xff" * 80):
        store.set(rendezvous._KEY, content)
        with pytest.raises(RendezvousStateError, match="else wrote to the store"):
            backend.get_state()
    assert not marker.exists()


class Gone:
    """A store whose host has ended."""

    def compare_set(self, *_: str) -> bytes:
        return b"nothing"

    def get(self, _: str) -> bytes:
        raise dist.DistNetworkError("recvValue failed")


def test_the_end_of_node_0_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not as nodes that did not join, seconds after they had."""
    with pytest.raises(rendezvous.StoreLostError):
        JsonBackend(Gone(), None).get_state()

    def lost(*_: Any) -> int:
        raise rendezvous.StoreLostError("the store of node 0 does not answer")

    monkeypatch.setattr(agent, "_run_to_the_end", lost)
    ours, other = socket.socketpair()
    with ours, other:
        request = LaunchRequest(str(tmp_path), num_nodes=2, node_rank=1, master_addr="node0", master_port=29500)
        assert agent.run_agent(request, RunDirectory(str(tmp_path)), ours) == 1
    said = "".join(capfd.readouterr())
    assert "error: node 0 has ended, or its store at node0:29500 can no longer be reached" in said
    assert "did not join" not in said


def test_a_state_that_is_not_signed_with_the_secret_is_refused() -> None:
    store = dist.HashStore()
    state = pickle.dumps(full_state())
    assert JsonBackend(store, OTHER).set_state(state) is not None
    with pytest.raises(RendezvousStateError, match="do not have the same DISTRIBUTED_TOKEN"):
        JsonBackend(store, SECRET).get_state()


def test_of_two_writers_one_wins_and_both_know_it() -> None:
    store = dist.HashStore()
    first, second = JsonBackend(store, SECRET), JsonBackend(store, SECRET)
    assert first.get_state() is None
    one, other = _RendezvousState(), full_state()
    bits, token, has_set = first.set_state(pickle.dumps(one))  # type: ignore[misc]
    assert has_set and vars(pickle.loads(bits)) == vars(one)
    bits, seen, has_set = second.set_state(pickle.dumps(other))  # type: ignore[misc]
    assert not has_set and seen == token and vars(pickle.loads(bits)) == vars(one)
    bits, _, has_set = second.set_state(pickle.dumps(other), seen)  # type: ignore[misc]
    assert has_set and vars(pickle.loads(bits)) == vars(other)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_torchs_dynamic_rendezvous_joins_three_nodes_over_it(
    secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    store, joined = dist.HashStore(), []

    def join(number: int) -> None:
        handler = DynamicRendezvousHandler.from_backend(
            "run", store, JsonBackend(store, secret), 3, 3, local_addr=f"node-{number}",
            timeout=RendezvousTimeout(join=datetime.timedelta(seconds=60)),
        )  # fmt: skip
        found = handler.next_rendezvous()
        joined.append((found.rank, found.world_size))
        handler._stop_heartbeats()

    threads = [threading.Thread(target=join, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(joined) == [(0, 3), (1, 3), (2, 3)]


def test_one_node_is_complete_at_once_and_opens_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "TCPStore", None)
    handler = rendezvous_of(LaunchRequest("run"))
    found = handler.next_rendezvous()
    assert isinstance(handler, OneNode) and (found.rank, found.world_size, handler.num_nodes_waiting()) == (0, 1, 0)
    found.store.set("key", "value")
    assert found.store.get("key") == b"value"
    assert handler.shutdown() and handler.is_closed()
