"""Observe training with TensorFlow: gradient norm, graph, weights and gradients, profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.loggers.observer import Observer

if TYPE_CHECKING:
    from distributed.backends.tensorflow import TensorFlowBackend
    from distributed.loggers.profiling import Profiler
    from distributed.state import MicroBatch


class TensorFlowObserver(Observer):
    """Observe the TensorFlow step."""

    def __init__(self, backend: TensorFlowBackend) -> None:
        super().__init__(backend.plan.world_size)
        self._backend = backend
        self.norm: float | None = None  # gradient norm of the newest update, before clipping
        self._kept: Any = None  # the batch for `graph`
        self._gradients: list[Any] = []  # for `local_values`

    def see(self, micro: MicroBatch) -> None:
        """Keep the first batch if `graph` needs it."""
        if self.keeps_batch:
            self.keeps_batch, self._kept = False, micro.batch

    def see_gradients(self, gradients: list[Any]) -> None:
        """Keep the gradients of an update if `local_values` needs them."""
        if self.keeps_gradients:
            self._gradients = gradients

    def gradient_norm(self) -> float | None:
        return self.norm

    def graph(self) -> bytes:
        from distributed.backends._tensorflow.watching import graph_of

        kept, self._kept = self._kept, None
        return graph_of(self._backend.objective.predict, self._backend.cast(kept))

    def local_values(self) -> Iterator[tuple[str, Any]]:
        from distributed.backends._tensorflow.watching import values_of

        return values_of(self._backend.steps.trained(), self._gradients)

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        from distributed.backends._tensorflow.profiler import TensorFlowProfiler

        return TensorFlowProfiler(directory, self._backend.context.rank, warmup, active)
