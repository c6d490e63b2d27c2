"""Make an update with DeepSpeed's engine. The engine clips, checks for NaN and divides by the loss scale itself, in one
pass over its partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.backends._torch.update import Update

if TYPE_CHECKING:
    import torch

    from distributed.backends._torch.objective import Loss
    from distributed.backends._torch.schedule import Schedule
    from distributed.backends.deepspeed import DeepSpeedBackend
    from distributed.state import StepResult, UpdateBatch


class EngineUpdate(Update):
    """Make the updates of a fit with DeepSpeed. At stage 0 the engine only steps the optimizer; the torch step does the
    rest."""

    _backend: DeepSpeedBackend

    def __init__(self, backend: DeepSpeedBackend, optimizer: torch.optim.Optimizer, schedule: Schedule) -> None:
        super().__init__(backend, optimizer, schedule)
        self._stage, self._wrapper = backend.stage, backend.wrapper
        self._divide_by = 1.0

    def _make_ready(self, update_batch: UpdateBatch, losses: list[Loss], result: StepResult) -> None:
        if self._stage == 0:
            super()._make_ready(update_batch, losses, result)
            return
        total: Any = self._backend.passes.take_total()
        self._divide_by = 1.0 if total is None else total.item() / update_batch.num_samples

    def _apply(self) -> bool:
        engine = self._wrapper.engine
        assert engine is not None
        if self._stage:
            return engine.step(self._divide_by)
        engine.wrapper.step()
        return True
