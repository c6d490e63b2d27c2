"""What a checkpoint holds of a run on TensorFlow: model, optimizer, learning rates and random generators."""

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
    """All ranks call each of its methods."""

    model: Any
    optimizer: Any  # None, and no `rates` either, where nothing is trained
    rates: Rates | None
    generators: Generators
    world: TensorFlowWorld
    data_parallel_size: int

    def sync_statistics(self) -> None:
        """Moving averages follow each rank's own samples; the main process' are evaluated and stored."""
        self.world.copy_from_main(statistics(self.model))

    def save(self, directory: Path, step: int) -> dict[str, Any]:
        """Write the state after `step` updates; returns what of it is JSON."""
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
        """Put a stored state back. False where the generators have none of their own there, and are to be seeded."""
        files.load_model(self.model, directory)
        if self.rates is not None:
            files.load_optimizer(self.optimizer, self.model, directory, state["optimizer"])
            self.rates.load(state, notice)
        return int(state["world_size"]) == self.data_parallel_size and self.generators.load(directory)

    def export(self, path: Path) -> None:
        """The model's variables in one file."""
        self.sync_statistics()
        if self.world.context.is_main_process:
            files.export(self.model, path)
        self.world.barrier()
