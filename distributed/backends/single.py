"""One process, no communication: the reference that every other backend must agree with."""

from __future__ import annotations

from typing import Any

from distributed.backends.torch_base import NoOptions, TorchBackend
from distributed.state import WorkerContext


class SingleBackend(TorchBackend[NoOptions]):
    """Training in one process."""

    def _join(self) -> WorkerContext:
        from distributed.launcher import worker_environment

        found = worker_environment()
        restarts = found.restart_count if found else 0
        return WorkerContext(0, 1, 0, 1, 0, "cuda:0" if self.plan.device == "cuda" else "cpu", restarts)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def key_value_store(self) -> Any:
        return None

    def barrier(self) -> None:
        return None
