"""Define what an engine does for a loop that a script runs itself: one pass for each batch, one update for each update batch."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from distributed.loggers.logged import Logged
from distributed.state import MicroBatch, StepResult, UpdateBatch


class OwnSteps(Protocol):
    """Take a loop's losses, one for each micro-batch, and make the update of each update batch.

    The methods are called in this order: `begin` for each update batch; `enter`, `backward` and `leave` for each micro-batch;
    and `finish` after the last `backward`. Every rank calls every method.

    Attributes:
        own_loss: the loss that the loop logs itself. It is reported in place of the losses passed to `backward`.
    """

    own_loss: Logged

    @property
    def model(self) -> Any:
        """The model that the script calls."""

    @property
    def optimizer(self) -> Any:
        """The optimizer that the script sees. Its `step` and `zero_grad` refuse to be called."""

    @property
    def is_owed(self) -> bool:
        """True if the micro-batch that was entered has had no backward pass."""

    @property
    def is_complete(self) -> bool:
        """True if all micro-batches of the update batch have had their backward passes."""

    def begin(self, update_batch: UpdateBatch) -> None:
        """Begin an update. A collective."""

    def enter(self, index: int) -> Any:
        """Enter micro-batch `index` of the update batch, and return its batch on the device. Not a collective."""

    def backward(self, value: Any) -> None:
        """Run the backward pass of the micro-batch that was entered. A collective. Raises ConfigError if it has had one."""

    def leave(self) -> None:
        """Leave the micro-batch that was entered, if there is one. Not a collective."""

    def finish(self) -> StepResult:
        """Make the update. A collective."""

    def report_own_loss(self, result: StepResult) -> None:
        """Replace the loss in `result` by the one in `own_loss`, if the loop has logged one. Not a collective."""

    def begin_evaluation(self) -> None:
        """Prepare the model for an evaluation by the script. A collective."""

    def evaluating(self, micro: MicroBatch) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for an evaluation of `micro`. It yields the batch on the device. Not a collective."""

    def gather(self, tensor: Any, num_samples: int | None) -> Any:
        """Return the rows of all ranks as one tensor on this rank's device. A collective.

        If `num_samples` is given, `tensor` belongs to a batch of which this rank has that many samples. The rows are then in the
        order of the samples, and each sample occurs once. Otherwise the rows are ordered by rank.
        """
