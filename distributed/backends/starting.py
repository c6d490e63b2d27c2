"""Start the runs of a backend: what the backend decides before any process trains. Loads no engine.

The row of a backend in `distributed.config.registry` names its class; `registry.starting_of` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.config.registry import BackendRow, backend_class
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.backends._torch.world import TorchWorld
    from distributed.backends.base import Backend
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.settings import DistributedConfig
    from distributed.launching.environments.base import WorkerEnvironment

Warn = Callable[[str], None]


class Starting:
    """Start the runs of a backend with our own launcher and the adapter that the registry names."""

    def __init__(self, row: BackendRow) -> None:
        self.backend_row = row

    def make(self, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
        """Return the adapter for these settings. Raises ConfigError for a setting that it refuses."""
        row = self.backend_row
        made: Backend[Any] = backend_class(row.name)(merged, merged.config.options(row.group), plan)
        return made

    def row(self, options: Any) -> BackendRow:
        """Return the registry row for the backend's `options`, which may choose an engine that needs another environment."""
        return self.backend_row

    def groups(self, options: Any) -> tuple[str, ...]:
        """Return the names of the further backends whose groups of options count too."""
        return ()

    def is_fit_in_workers(self, plan: ProcessPlan) -> bool:
        """Return whether a `fit` outside of a worker starts workers. Otherwise it trains where it was called."""
        return plan.world_size > 1

    def launcher(self) -> str:
        """Return the name of the module whose `serve` starts the workers."""
        return "distributed.launching.forkserver"

    def launcher_options(self, config: DistributedConfig, plan: ProcessPlan) -> dict[str, Any]:
        """Return what the launcher needs besides the settings of a run. JSON-able."""
        return {}

    def on_epoch(self, config: DistributedConfig) -> Callable[[Mapping[str, Any]], None] | None:
        """Return the function that the process that called `fit` calls with the row of each finished epoch, or None."""
        return None

    def join(
        self, plan: ProcessPlan, config: DistributedConfig, warn: Warn, found: WorkerEnvironment, call: str
    ) -> TorchWorld:
        """Join the other processes of a script without a Trainer. Every rank calls it.

        `call` is what the script called, for messages. Raises ConfigError where the engine has no torch tensors.
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
