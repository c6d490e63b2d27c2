"""What an update's gradients were like, read one update later, so that the host never waits for the device to finish."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from distributed.backends._torch.objective import Loss
from distributed.state import Group


class Reading:
    """A number on its way from the device to the host."""

    def __init__(self, value: torch.Tensor) -> None:
        """`value` has one element. The copy starts now and follows what the device has been given so far."""
        self._value = value.detach().to("cpu", non_blocking=True, copy=True)
        self._arrived = torch.cuda.Event() if value.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> float:
        """The number. Waits for its copy only, not for what the device was given afterwards."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)


@dataclasses.dataclass(frozen=True)
class Unread:
    """An update that was made before anyone knew whether its gradients were finite."""

    reading: Reading  # 0 where they were
    group: Group  # without the batches
    losses: list[Loss]  # values alone

    @classmethod
    def of(cls, bad: torch.Tensor, group: Group, losses: Sequence[Loss]) -> Unread:
        """`bad` is 0 where all gradients are finite."""
        values = [Loss(loss.value.detach(), None) for loss in losses]
        return cls(Reading(bad), Group([], group.num_samples, group.position), values)

    def is_bad(self) -> bool:
        """Whether a gradient was NaN or infinite."""
        value = self.reading.read()
        return value != 0.0 or math.isnan(value)
