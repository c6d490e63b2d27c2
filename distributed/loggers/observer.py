"""What can be observed of an engine beside its metrics. An engine need not offer any of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.errors import TrainingError

if TYPE_CHECKING:
    from distributed.loggers.profiling import Profiler


class Observer:
    """Observe nothing. Adapters override what their engine offers.

    Only `gradient_norm` may be a collective, and `local_values` where `cuts_weights`: all ranks call these two at the same step.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.keeps_batch = False
        self.keeps_gradients = False

    @property
    def cuts_weights(self) -> bool:
        """Whether a rank holds pieces of the parameters, so that it cannot run the model by itself."""
        return False

    def keep_batch(self, keep: bool) -> None:
        """Keep a batch of the next update for `graph`, or do not. Called before the first update of a fit."""
        self.keeps_batch = keep

    def keep_gradients(self) -> None:
        """Keep the gradients of each update for `local_values`, from now on."""
        self.keeps_gradients = True

    def gradient_norm(self) -> float | None:
        """Return the global norm of the newest update's gradient before clipping, or None where it is not known. All ranks."""
        return None

    def waited_s(self) -> float | None:
        """Return the seconds of an update in which this rank waited for others, beyond what it computed meanwhile.

        This is a mean over the updates that were measured, or None where the engine does not measure it.
        """
        return 0.0 if self.world_size == 1 else None

    def graph(self) -> bytes:
        """Return a GraphDef of the model as TensorBoard reads it, traced on one sample of the batch that was kept.

        Leaves no trace in what is trained. Raises whatever the model raises under a tracer, and TrainingError where the engine
        draws no graph.
        """
        raise TrainingError("this engine draws no graph")

    def local_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (`weights/NAME` or `gradients/NAME`, flat array of floats) of what this rank holds after the newest update.

        Where `cuts_weights`, an array may be a piece of the parameter.
        """
        return iter(())

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        """Return a profiler that records `active` updates of this rank after `warmup` others and writes to `directory`.

        Every rank makes one. None where the engine has no profiler.
        """
        return None
