"""Copy the state of a torch engine into kept memory, for `checkpoint_async`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from distributed.backends._torch.sharding import local
from distributed.checkpoints.staging import Copying

if TYPE_CHECKING:
    from distributed.backends.torch_base import TorchBackend

# Optimizer -> how many tensors of the size of a parameter it keeps for each, with the options of a group.
_NUM_TENSORS: dict[type, Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: 1 if group["momentum"] else 0,
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW), lambda group: 3 if group["amsgrad"] else 2),
    **dict.fromkeys((torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta), lambda group: 2),
}


class TorchCopying(Copying):
    """Copy the state of a torch engine."""

    def __init__(self, backend: TorchBackend[Any]) -> None:
        self._backend = backend

    def allocate(self, num_bytes: int) -> memoryview:
        is_pinned = self._backend.device.type == "cuda"  # a GPU copies into pinned memory at full speed
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned).numpy().data

    @property
    def is_on_all_ranks(self) -> bool:
        return self._backend.observer.cuts_weights

    def num_bytes(self) -> tuple[int, int]:
        return self._of_state() if self.is_on_all_ranks or self._backend.context.is_main_process else (0, 0)

    def _of_state(self) -> tuple[int, int]:
        """Return what `num_bytes` does for the tensors that this process has."""
        own = self._backend
        weights = self._bytes_of_weights()
        slots = [value for state in getattr(own.optimizer, "state", {}).values() for value in state.values()]
        kept = sum(local(value).nbytes for value in slots if isinstance(value, torch.Tensor))
        known = kept or _bytes_after_an_update(own.optimizer)
        if known is None:
            trained = sum(local(each).nbytes for each in own.plain.parameters() if each.requires_grad)
            return weights, weights + 2 * trained
        return weights + known, weights + known

    def _bytes_of_weights(self) -> int:
        return sum(local(each).nbytes for each in [*self._backend.plain.parameters(), *self._backend.plain.buffers()])


def _bytes_after_an_update(optimizer: Any) -> int | None:
    """Return the bytes that the optimizer will keep for the parameters that are trained, or None if it is not one of torch's."""
    num_tensors = _NUM_TENSORS.get(type(optimizer))
    if num_tensors is None:
        return None
    return sum(
        num_tensors(group) * local(each).nbytes
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad
    )
