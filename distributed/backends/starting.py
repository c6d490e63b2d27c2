"""Start the runs of a backend: decisions that a backend makes before any process trains. Loads no engine.

The backend's entry in `distributed.config.registry` names the class; `distributed.backends.starting_of` creates the object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from distributed.backends import backend_class
from distributed.config.plan import plan_processes
from distributed.config.registry import BackendEntry
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.settings import DistributedConfig
    from distributed.launching.environments.base import WorkerEnvironment
    from distributed.state import EpochMetrics

Warn = Callable[[str], None]


class Starting:
    """Start the runs of a backend with our own launcher and the adapter that the registry names."""

    def __init__(self, entry: BackendEntry) -> None:
        self.backend_entry = entry

    def make(self, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
        """Return the adapter for these settings. Raises ConfigError for a setting that it refuses."""
        entry = self.backend_entry
        return backend_class(entry.name)(merged, merged.config.options(entry.group), plan)

    def plan(self, config: DistributedConfig) -> ProcessPlan:
        """Return the processes for the resource settings. Raises DistributedError as `plan_processes` does."""
        return plan_processes(config)

    def entry(self, options: Any) -> BackendEntry:
        """Return the registry entry for the backend's `options`, which may choose an engine that needs another environment."""
        return self.backend_entry

    def groups(self, options: Any) -> tuple[str, ...]:
        """Return the names of other backends whose option groups apply too."""
        return ()

    def is_fit_in_workers(self, plan: ProcessPlan) -> bool:
        """Return whether a `fit` outside of a worker starts workers. If not, it trains in the process that called
        it."""
        return plan.world_size > 1

    def launcher(self) -> str:
        """Return the name of the module whose `serve` starts the workers."""
        return "distributed.launching.forkserver"

    def launcher_options(self, config: DistributedConfig, plan: ProcessPlan) -> dict[str, Any]:
        """Return the options that the launcher needs in addition to the settings of a run. JSON-able."""
        return {}

    def on_epoch(self, config: DistributedConfig) -> Callable[[EpochMetrics], None] | None:
        """Return a function, or None. The process that called `fit` calls it with the metrics of each finished epoch."""
        return None

    def join(
        self, plan: ProcessPlan, config: DistributedConfig, warn: Warn, found: WorkerEnvironment, call: str
    ) -> TorchWorld:
        """Join the other processes of a script without a Trainer. Every rank calls it.

        `call` names the function that the script called, for messages. Raises ConfigError if the engine has no torch
        tensors.
        """
        raise ConfigError(
            f"{call} joins processes for torch tensors, which backend={config.backend!r} does not use: use Trainer"
        )


class TorchStarting(Starting):
    """Start the runs of an engine that communicates over a process group of torch."""

    def join(
        self, plan: ProcessPlan, config: DistributedConfig, warn: Warn, found: WorkerEnvironment, call: str
    ) -> TorchWorld:
        from distributed.backends._torch.world import ProcessGroup

        return ProcessGroup(plan, config, warn, found=found, call=call)
