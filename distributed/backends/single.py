"""One process, no communication: the reference that every other backend must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.backends.torch_base import NoOptions, TorchBackend

if TYPE_CHECKING:
    from distributed.backends._torch.world import World


class SingleBackend(TorchBackend[NoOptions]):
    """Training in one process."""

    def _join(self) -> World:
        from distributed.backends._torch.world import OneProcess

        return OneProcess(self.plan)
