"""Copy the state of DeepSpeed's engine into kept memory, for `checkpoint_async`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.backends._torch.copying import TorchCopying

if TYPE_CHECKING:
    from distributed.backends.deepspeed import DeepSpeedBackend


class DeepSpeedCopying(TorchCopying):
    """Copy the state of DeepSpeed's engine. From stage 1 on, each rank copies its part of the weights and of the optimizer's state."""

    _backend: DeepSpeedBackend

    @property
    def is_on_all_ranks(self) -> bool:
        return self._backend.stage > 0

    def _of_state(self) -> tuple[int, int]:
        """Return the bytes before the first update of a fit, when each rank has the whole weights."""
        own, (known, estimated) = self._backend, super()._of_state()
        if not own.stage:
            return known, estimated
        weights, ranks = self._bytes_of_weights(), own.context.world_size
        if own.wrapper.engine is None:  # the optimizer's state is whole too
            if own.wrapper.held is not None:
                known = estimated = weights + own.wrapper.held.num_bytes
            return -(-known // ranks), -(-estimated // ranks)
        part = -(-weights // ranks)
        return part + known - weights, part + estimated - weights
