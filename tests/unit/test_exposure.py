"""What a run leaves open to others is a warning at its start."""

from __future__ import annotations

import pytest

from distributed.backends import entry_in_use
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching import exposure
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.exposure import engine_warnings, launcher_warnings, store_warnings, warnings_of
from distributed.launching.request import LaunchRequest

SECRET = "0123456789abcdef0123"


def warnings(backend: str, num_nodes: int, nproc_per_node: int) -> list[str]:
    config = DistributedConfig(backend=backend, num_nodes=num_nodes, master_addr="node0", master_port=29500)
    return warnings_of(config, ProcessPlan(num_nodes, nproc_per_node, "cpu", backend), entry_in_use(config, backend))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISTRIBUTED_TOKEN", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(exposure, "_shown", set())


@pytest.mark.parametrize("backend", ["single", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray"])
def test_one_node_opens_nothing_to_warn_of(backend: str) -> None:
    assert warnings(backend, 1, 2) == []


def test_tensorflows_servers_are_a_warning_where_there_are_several_processes() -> None:
    assert warnings("tensorflow", 1, 1) == []
    [text] = warnings("tensorflow", 1, 2)
    assert text.startswith("warning: TensorFlow's workers listen on all interfaces") and "docs/security.md" in text


def test_nodes_without_a_secret_are_one_warning_that_names_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = warnings("pytorch-ddp", 2, 1)
    assert "rendezvous at node0:29500 without a secret" in text and "not run code" in text and "--token-file" in text
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    assert warnings("pytorch-ddp", 2, 1) == []


def test_a_secret_that_can_be_guessed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", "short")
    with pytest.raises(ConfigError, match="needs at least 16"):
        warnings("pytorch-ddp", 2, 1)


def worker(source: str, world_size: int = 2, restart_count: int = 0) -> WorkerEnvironment:
    return WorkerEnvironment(0, 0, world_size, 1, 0, "node0", 29500, restart_count, source)


@pytest.mark.parametrize("source", ["environment", "slurm", "TF_CONFIG", "pod"])
def test_launchers_without_an_open_port_are_no_warning(source: str) -> None:
    assert launcher_warnings(worker(source)) == []


@pytest.mark.parametrize(
    ("source", "start"),
    [
        (
            "environment",
            "torchrun listens on all interfaces without a secret, and anyone who connects to its c10d rendezvous",
        ),
        ("openmpi", "mpirun listens on all interfaces: run where"),
        ("horovodrun", "horovodrun listens on all interfaces without a secret, and"),
    ],
)
def test_another_launchers_ports_are_a_warning_that_each_process_gets_once(
    source: str, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "environment":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert (
        launcher_warnings(None) == launcher_warnings(worker(source, 1)) == launcher_warnings(worker(source, 2, 1)) == []
    )
    [text] = launcher_warnings(worker(source))
    assert text.startswith(start) and "only people you trust" in text
    assert launcher_warnings(worker(source)) == []


def test_a_store_that_a_worker_hosts_without_a_secret_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    assert store_warnings("node0", 29500) == []
    monkeypatch.delenv("DISTRIBUTED_TOKEN")
    [text] = store_warnings("fd00::1", 29500)
    assert text.startswith("the processes rendezvous at [fd00::1]:29500 without a secret") and "not run code" in text
    assert store_warnings("fd00::1", 29500) == []


def test_workers_of_our_launcher_say_nothing_that_it_said_before_it_started_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exposure, "launched_by", lambda: LaunchRequest("run"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launcher_warnings(worker("environment")) + store_warnings("node0", 29500) + engine_warnings("all") == []
