"""Train in one process without communication. This is the reference that every other backend must agree with."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from distributed.backends.base import If, Refusals
from distributed.backends.torch_base import PROCESS_GROUPS, NoOptions, TorchBackend

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld


class SingleBackend(TorchBackend[NoOptions]):
    """Run the torch step in one process."""

    refuses_several: ClassVar[str] = ""
    refuses: ClassVar[Refusals] = {
        **PROCESS_GROUPS,
        # If the backend was not chosen by name, the setting is meant for runs with several processes. It is ignored
        # here.
        "communication_backend": (
            If(
                "where the backend is chosen by name",
                lambda own: own.config.backend == own.plan.backend,
                "one process has no transport: drop it",
            ),
        ),
    }

    def _join(self) -> TorchWorld:
        from distributed.backends._torch.world import OneTorchProcess

        return OneTorchProcess(self.plan)
