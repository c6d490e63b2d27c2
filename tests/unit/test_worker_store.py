"""The stores that a script's own `init_process_group()` opens in a worker."""

from __future__ import annotations

import contextlib
import errno
import importlib
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from distributed.backends._torch import worker_store
from distributed.launching import exposure
from distributed.launching.request import LaunchRequest
from tests.conftest import free_port
from tests.unit.test_listening import OWN_ADDRESS, needs_own_address

_S = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of rank 0's store, in a worker of several nodes."""
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for method in ("env", "tcp"):
        monkeypatch.setitem(handlers, method, handlers[method])
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    free = free_port()
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free),
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    worker_store.use(None)
    yield free
    worker_store.use(None)


def is_open(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) != errno.ECONNREFUSED


@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:{port}"])
def test_torchs_store_listens_at_the_address_that_it_is_given_alone(method: str, port: int) -> None:
    with contextlib.closing(dist.rendezvous(method.format(port=port), 0, 1, timeout=_S)) as found:
        store, rank, world_size = next(found)
    del found
    store.set("key", "value")
    assert (rank, world_size) == (0, 1) and is_open("127.0.0.1", port) and not is_open("127.0.0.2", port)
    assert dist.TCPStore("127.0.0.1", port, None, False, _S).get("key") == b"value"
    del store
    assert not is_open("127.0.0.1", port)


@needs_own_address
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_store_that_other_machines_reach_is_a_warning_in_workers_of_another_launcher(
    is_ours: bool, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exposure, "_shown", set())
    monkeypatch.setattr(exposure, "launched_by", lambda: LaunchRequest("run") if is_ours else None)
    for address in ("127.0.0.1", OWN_ADDRESS, OWN_ADDRESS):
        monkeypatch.setenv("MASTER_ADDR", address)
        next(dist.rendezvous("env://", timeout=_S))
    warning = f"warning: the store of torch.distributed listens at {OWN_ADDRESS}:{port} without a secret"
    assert capsys.readouterr().err.count(warning) == (0 if is_ours else 1)


@pytest.mark.parametrize("host", ["nowhere.invalid", None])
def test_what_torch_says_of_a_wrong_environment_is_left_to_torch(
    host: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host is None:
        monkeypatch.delenv("MASTER_ADDR")
    else:
        monkeypatch.setenv("MASTER_ADDR", host)
    with pytest.raises((ValueError, dist.DistError), match=r"MASTER_ADDR expected|nowhere"):
        next(dist.rendezvous("env://", timeout=timedelta(seconds=1)))
    assert not is_open("127.0.0.1", port)


def test_a_worker_of_another_rank_or_under_torchruns_store_opens_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dist.TCPStore("127.0.0.1", port, None, True, _S, wait_for_workers=False)
    monkeypatch.setattr(worker_store, "listen_at", lambda *_, **__: pytest.fail("it listens"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    under_torchrun, _, _ = next(dist.rendezvous("env://", timeout=_S))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    second, rank, _ = next(dist.rendezvous("env://", timeout=_S))
    server.set("key", "value")
    assert rank == 1 and second.get("key") == under_torchrun.get("key") == b"value"
