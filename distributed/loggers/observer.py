"""What can be observed of an engine in addition to its metrics. An engine need not offer any of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.callbacks import Counted
from distributed.errors import TrainingError

if TYPE_CHECKING:
    from distributed.loggers.profiling import Profiler


class Observer:
    """Observe nothing. Adapters override the methods that their engine offers.

    `gradient_norm` may be a collective, and so may `local_values` if `cuts_weights`. All ranks call these two at the same step.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.keeps_batch = False
        self.keeps_gradients = False
        self.keeps_example = False

    @property
    def cuts_weights(self) -> bool:
        """Return whether a rank holds pieces of the parameters, so that it cannot run the model by itself."""
        return False

    def keep_batch(self, keep: bool) -> None:
        """Set whether to keep a batch of the next update for `graph`. Called before the first update of a fit."""
        self.keeps_batch = keep

    def keep_gradients(self) -> None:
        """From now on, keep the gradients of each update for `local_values`."""
        self.keeps_gradients = True

    def keep_example(self) -> None:
        """Keep a batch of the next update for `write_program`. Called before the first update of a fit."""
        self.keeps_example = True

    def write_program(self, path: Path) -> str:
        """Write the trained model to `path` as a program that runs without its class. Called after a fit, on the main process.

        Returns the name of a module whose `_load_pyfunc(path)` loads it for MLflow. Raises DistributedError with the reason if
        there is no such form of this model.
        """
        raise TrainingError("this engine cannot export the model as a program")

    def gradient_norm(self) -> float | None:
        """Return the global norm of the newest update's gradient before clipping, or None if it is not known. All ranks call it."""
        return None

    def waited_s(self) -> float | None:
        """Return the seconds of an update in which this rank waited for others and did not compute.

        The value is a mean over the updates that were measured. Return None if the engine does not measure it.
        """
        return 0.0 if self.world_size == 1 else None

    def newly_waited_s(self) -> float | None:
        """Return the seconds of an update in which this rank waited for others, as the mean over the updates since the last call.

        Return None if no update was measured since then, or the engine does not measure it. The loop calls this every few updates.
        """
        return None

    def graph(self) -> bytes:
        """Return a GraphDef of the model as TensorBoard reads it, traced on one sample of the batch that was kept.

        Does not change the state of training. Raises whatever the model raises under a tracer, and TrainingError if the engine
        offers no graph.
        """
        raise TrainingError("this engine draws no graph")

    def named_parameters(self) -> list[tuple[str, Any]]:
        """Return (name, parameter) of each parameter of the model, or nothing if the engine has no parameters with gradients."""
        return []

    def local_values(self) -> Iterator[tuple[str, Any]]:
        """Yield (`weights/NAME` or `gradients/NAME`, flat array of floats) of what this rank holds after the newest update.

        If `cuts_weights`, an array may be a piece of the parameter.
        """
        return iter(())

    def profiler(self, directory: Path, warmup: int, active: int) -> Profiler | None:
        """Return a profiler that records `active` updates of this rank after `warmup` others and writes to `directory`.

        Every rank creates one. Return None if the engine has no profiler.
        """
        return None

    # The interface `distributed.callbacks.base.Observed`. An adapter that refuses the callbacks that need it does not override it.

    def sampling(self, seed: int) -> contextlib.AbstractContextManager[Callable[[Any], Any]]:
        raise TrainingError("this engine draws no samples in hooks")

    def count_updates(self, *, counts_flops: bool) -> None:
        raise TrainingError("this engine does not count updates")

    @property
    def counted(self) -> Counted:
        return Counted()

    @property
    def computes_in(self) -> str:
        return ""

    @property
    def device_name(self) -> str:
        return ""
