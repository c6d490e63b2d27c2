"""What a run leaves open to others is a warning at its start."""

from __future__ import annotations

import pytest

from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.exposure import warnings_of

SECRET = "0123456789abcdef0123"


def warnings(backend: str, num_nodes: int, nproc_per_node: int) -> list[str]:
    config = DistributedConfig(backend=backend, num_nodes=num_nodes, master_addr="node0", master_port=29500)
    return warnings_of(config, ProcessPlan(num_nodes, nproc_per_node, "cpu", backend))


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)


@pytest.mark.parametrize("backend", ["single", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray"])
def test_one_node_opens_nothing_to_warn_of(backend: str) -> None:
    assert warnings(backend, 1, 2) == []


def test_tensorflows_servers_are_a_warning_where_there_are_several_processes() -> None:
    assert warnings("tensorflow", 1, 1) == []
    [text] = warnings("tensorflow", 1, 2)
    assert text.startswith("warning: TensorFlow's workers listen on all interfaces") and "docs/security.md" in text


def test_nodes_without_a_secret_are_one_warning_that_names_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = warnings("pytorch-ddp", 2, 1)
    assert "meet at node0:29500 without a secret" in text and "not run code" in text and "--token-file" in text
    monkeypatch.setenv("DISTRIBUTED_TOKEN", SECRET)
    assert warnings("pytorch-ddp", 2, 1) == []


def test_a_secret_that_can_be_guessed_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRIBUTED_TOKEN", "short")
    with pytest.raises(ConfigError, match="needs at least 16"):
        warnings("pytorch-ddp", 2, 1)
