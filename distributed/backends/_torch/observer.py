"""Observe training with torch: gradient norm, graph, weights and gradients, profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import ConfigError
from distributed.loggers.observer import Observer

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend
    from distributed.loggers.profiling import Profiler
    from distributed.state import MicroBatch


class TorchObserver(Observer):
    """Observe a torch engine."""

    def __init__(self, backend: TorchBackend[Any]) -> None:
        super().__init__(backend.plan.world_size)
        self._backend = backend
        self._kept: MicroBatch | None = None  # for `graph`

    def see(self, micro: MicroBatch) -> None:
        """Keep the first batch that a wrapper trains on, if the graph needs it."""
        self._kept = micro if self.keeps_batch else None

    def gradient_norm(self) -> float | None:
        return self._backend.update.gradient_norm()

    def graph(self) -> bytes:
        from distributed.backends._torch.watching import graph_of

        own = self._backend
        kept, self._kept = self._kept, None
        if self.cuts_weights:
            raise ConfigError("its parameters are sharded across the processes")
        if kept is None:
            raise ConfigError("no batch was kept")
        with own.generators.untouched(), own.precision.autocast():
            return graph_of(own.plain, own.passes.objective, own.passes.move(kept.batch), kept.num_samples)

    def local_values(self) -> Iterator[tuple[str, Any]]:
        from distributed.backends._torch.watching import values_of

        return values_of(self._backend.plain)

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._torch.profiler import TorchProfiler

        return TorchProfiler(directory, self._backend.context.rank, self._backend.device, warmup, active)
