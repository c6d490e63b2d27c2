"""What a process without a launcher is told about itself."""

from __future__ import annotations

import pytest

from distributed import destroy_process_group, get_distributed_info, get_rank, init_process_group
from distributed.comm import membership
from distributed.errors import ResourceError


@pytest.fixture(autouse=True)
def _leave():
    yield
    destroy_process_group()


@pytest.mark.parametrize(("gpus", "transport"), [(0, "gloo"), (2, "nccl")])
def test_one_process_is_told_the_transport_that_several_would_use(gpus, transport, monkeypatch):
    monkeypatch.setattr(membership, "visible_gpus", lambda: gpus)

    info = get_distributed_info()

    assert (info["available"], info["initialized"], info["backend"], info["device"]) == (False, False, transport, None)


def test_after_joining_it_is_the_transport_that_was_asked_for(monkeypatch):
    monkeypatch.setattr(membership, "visible_gpus", lambda: 2)

    init_process_group(backend="gloo", world_size=1, rank=0)

    info = get_distributed_info()
    assert (info["initialized"], info["backend"], info["device"], info["world_size"]) == (True, "gloo", "cpu", 1)
    init_process_group(backend="gloo")  # once more changes nothing
    destroy_process_group()
    assert get_distributed_info()["backend"] == "nccl"


def test_one_process_that_knows_neither_its_rank_nor_the_others_is_not_rank_0(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ResourceError, match="WORLD_SIZE=4 without RANK"):
        get_rank()
