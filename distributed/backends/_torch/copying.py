"""Copy the state of a torch engine into kept memory, for `checkpoint_async`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.sharding import local
from distributed.checkpoints.staging import Copying

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend


class TorchCopying(Copying):
    """Copy the state of a torch engine."""

    def __init__(self, backend: TorchBackend[Any]) -> None:
        self._backend = backend

    def allocate(self, num_bytes: int) -> memoryview:
        is_pinned = self._backend.device.type == "cuda"  # a GPU copies into pinned memory at full speed
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).numpy().data

    def num_bytes(self) -> tuple[int, int]:
        own = self._backend
        if not own.observer.cuts_weights and not own.context.is_main_process:
            return 0, 0
        slots = [value for state in getattr(own.optimizer, "state", {}).values() for value in state.values()]
        weights = sum(local(each).nbytes for each in [*own.plain.parameters(), *own.plain.buffers()])
        known = sum(local(value).nbytes for value in slots if isinstance(value, torch.Tensor))
        trained = sum(local(each).nbytes for each in own.plain.parameters() if each.requires_grad)
        return weights + known, weights + (known or 2 * trained)
