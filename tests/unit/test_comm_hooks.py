"""What a communication hook does when a collective fails because a rank has died: it raises that error and uses no unfilled buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.backends._torch.comm_hooks import Hierarchical
from distributed.backends._torch.topk import TopK


class Bucket:
    """One bucket of DDP with one parameter."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter, self._buffer = parameter, torch.ones(parameter.numel())

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self._parameter]


class Failed:
    """A collective that another rank has not taken part in."""

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1"))
        return future


class Group:
    def size(self) -> int:
        return 2


@pytest.mark.parametrize("kind", ["topk", "hierarchical"])
def test_the_error_of_a_gather_is_raised(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(8))
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    for name in (
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "all_reduce",
    ):
        monkeypatch.setattr(dist, name, lambda *_, **__: Failed(), raising=False)
    if kind == "topk":
        hook: Any = TopK([("weight", parameter)], 0.5)
    else:
        hook = Hierarchical.__new__(Hierarchical)
        hook._near = hook._far = Group()

    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        hook.average(Bucket(parameter)).wait()
