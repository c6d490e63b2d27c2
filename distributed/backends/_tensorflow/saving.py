"""Save and load the state of a run on TensorFlow: model, optimizer, learning rates and random generators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._keras import files
from distributed.backends._tensorflow.generators import Generators
from distributed.backends._tensorflow.models import statistics
from distributed.backends._tensorflow.optim import Rates
from distributed.backends._tensorflow.world import TensorFlowWorld


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """State of a run. All methods are collectives: all ranks must call them."""

    model: Any
    optimizer: Any  # None, like `rates`, if nothing is trained
    rates: Rates | None
    generators: Generators
    world: TensorFlowWorld
    data_parallel_size: int

    def sync_statistics(self) -> None:
        """Copy the moving averages of the main process to all ranks. Each rank's averages follow its own samples."""
        self.world.copy_from_main(statistics(self.model))

    def save(self, directory: Path, step: int) -> dict[str, Any]:
        """Write the state after `step` updates. Return the part of the state that is stored as JSON."""
        self.sync_statistics()
        extra: dict[str, Any] = {"world_size": self.data_parallel_size, "step": step, "scaler": None}
        if self.world.context.is_main_process:
            files.save_model(self.model, directory)
            if self.rates is not None:
                extra["optimizer"] = files.save_optimizer(self.optimizer, self.model, directory)
                extra["optimizer"] |= {"learning_rate": self.rates.fixed}
        if self.rates is not None:
            extra |= self.rates.state()
        self.generators.save(directory)
        return extra

    def load(self, directory: Path, state: Mapping[str, Any], notice: Callable[[str], None]) -> bool:
        """Restore a stored state. Return False if it has no states for this run's generators. The caller must then
        seed them."""
        files.load_model(self.model, directory)
        if self.rates is not None:
            files.load_optimizer(self.optimizer, self.model, directory, state["optimizer"])
            self.rates.load(state, notice)
        return int(state["world_size"]) == self.data_parallel_size and self.generators.load(directory)

    def export(self, path: Path) -> None:
        """Write the model's variables into one file."""
        self.sync_statistics()
        if self.world.context.is_main_process:
            files.export(self.model, path)
        self.world.barrier()
