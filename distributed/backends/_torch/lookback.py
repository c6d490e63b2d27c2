"""Read whether an update's gradients were finite one update later, so that the host never waits for the device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from distributed.backends._torch.objective import Loss
from distributed.state import UpdateBatch


class Reading:
    """Copy a number from the device to the host asynchronously."""

    def __init__(self, value: torch.Tensor) -> None:
        """Start the copy of `value`, which has one element. It runs after the work already queued on the device."""
        self._value = value.detach().to("cpu", non_blocking=True, copy=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> float:
        """Return the number. The host waits only for its copy, not for work queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


@dataclasses.dataclass(frozen=True)
class Unread:
    """Hold an update that was made before it was known whether its gradients were finite."""

    reading: Reading  # 0 if the gradients were finite
    update_batch: UpdateBatch  # without the batches
    losses: list[Loss]  # values only

    @classmethod
    def of(cls, bad: torch.Tensor, update_batch: UpdateBatch, losses: Sequence[Loss]) -> Unread:
        """Return the record of an update. `bad` is 0 if all gradients are finite."""
        values = [Loss(loss.value.detach(), None) for loss in losses]
        return cls(Reading(bad), dataclasses.replace(update_batch, micro_batches=[]), values)

    def is_bad(self) -> bool:
        """Return whether a gradient was NaN or infinite."""
        value = self.reading.read()
        return value != 0.0 or math.isnan(value)
