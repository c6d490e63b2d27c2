"""Start the runs of Horovod. Keras on TensorFlow has its own adapter and environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.backends._horovod.rules import HorovodOptions
from distributed.backends.starting import Starting, Warn

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.registry import BackendEntry
    from distributed.config.settings import DistributedConfig
    from distributed.launching.environments.base import WorkerEnvironment


class HorovodStarting(Starting):
    """Start the runs of Horovod."""

    def make(self, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
        options: HorovodOptions = merged.config.options(self.backend_entry.group)
        if options.keras_backend == "torch":
            return super().make(merged, plan)
        from distributed.backends._horovod.keras_backend import HorovodKerasBackend

        return HorovodKerasBackend(merged, options, plan)

    def entry(self, options: HorovodOptions) -> BackendEntry:
        if options.keras_backend == "torch":
            return self.backend_entry
        from distributed.backends._horovod.keras_backend import entry_on_tensorflow

        return entry_on_tensorflow(self.backend_entry)

    def join(
        self, plan: ProcessPlan, config: DistributedConfig, warn: Warn, found: WorkerEnvironment, call: str
    ) -> TorchWorld:
        from distributed.backends._horovod.world import join

        return join(plan, config, warn, found, call)
