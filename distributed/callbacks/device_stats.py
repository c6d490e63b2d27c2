"""Log the use and the memory of GPUs with each log line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.callbacks.base import Callback
from distributed.callbacks.gpus import Gpus

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState


class DeviceStats(Callback):
    """Log `gpu/utilization_N` in percent and `gpu/memory_gib_N` of the GPU of local rank N on the first node.

    The values are part of the log lines of training, so every logger gets them. TensorBoard gets the same values without this
    callback. They are read at most once a second. If nothing can be read, a notice says why.
    """

    def __init__(self) -> None:
        self._gpus: Gpus | None = None

    def on_train_start(self, state: TrainState) -> None:
        self._gpus = Gpus(self.context.worker) if self.context.worker.is_main_process else None
        if self._gpus is not None and (reason := self._gpus.missing()):
            self.context.notice(f"DeviceStats logs nothing: {reason}")

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if self._gpus is not None and state.step % self.context.config.log_every_n_steps == 0:
            for name, value in self._gpus.read().items():
                self.context.log(name, value)

    def on_train_end(self, state: TrainState) -> None:
        if self._gpus is not None:
            self._gpus.close()
        self._gpus = None

    def on_error(self, state: TrainState, error: BaseException) -> None:
        self.on_train_end(state)
