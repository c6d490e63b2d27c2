"""Keep the values that the loop of a script logs, with their weights, and separate those of its validation."""

from __future__ import annotations

from typing import Any

from distributed.backends.base import Backend
from distributed.callbacks.media import Media
from distributed.errors import ConfigError
from distributed.loggers.logged import Logged
from distributed.metrics.monitor import PREFIX
from distributed.state import StepResult
from distributed.training.validation import Validation, add, means_of

TRAINING = "training"  # the loop over the training loader


class BatchWeights:
    """Weight the values that the script logs by the samples of its current batch. In nested loops, this is the newest batch.

    Args:
        logged: the values of training.
        of_validation: the values of the script's validation. Those logged in the loop over the training loader count once each.
    """

    def __init__(self, logged: Logged, of_validation: Logged) -> None:
        self._logged, self._of_validation = logged, of_validation
        self._num_samples: dict[object, int] = {}  # loop -> samples of this rank in its batch; the newest last

    @property
    def num_samples(self) -> int | None:
        """The samples of this rank in the newest batch, or None outside of all loops."""
        return next(reversed(self._num_samples.values()), None)

    def take(self, of_loop: object, num_samples: int) -> None:
        """Begin with the next batch of the loop `of_loop`, which has `num_samples` on this rank."""
        self._num_samples.pop(of_loop, None)
        self._num_samples[of_loop] = num_samples
        self._weigh()

    def end(self, of_loop: object) -> None:
        """End the loop `of_loop`. The batch of the loop around it counts again."""
        self._num_samples.pop(of_loop, None)
        self._weigh()

    def _weigh(self) -> None:
        number, is_training = self.num_samples, next(reversed(self._num_samples), None) == TRAINING
        self._logged.weigh(number)
        self._of_validation.weigh(None if is_training else number)


class LoggedValidation(Validation):
    """The metrics of a validation that the script has made and logged."""

    def __init__(self) -> None:
        super().__init__({})
        self.prefixes = (PREFIX,)
        self.logged = Logged(reserves=False)
        self._steps: dict[str, int] = {}  # metric -> the update after which this rank has logged it

    @property
    def has_stream(self) -> bool:
        """Return whether the names of the metrics are not known before the first validation."""
        return True

    def log(self, name: str, value: Any, reduce: str, step: int) -> None:
        """Keep a value that was measured after update `step`. It replaces the values of earlier updates. Not a collective."""
        if isinstance(value, Media):
            raise ConfigError(
                f"log('{PREFIX}{name}', {type(value).__name__}(...)) is no metric: drop {PREFIX!r} from its name"
            )
        if self._steps.get(name, step) != step:
            self.logged.forget([name])
        self.logged.log(name, value, reduce)
        self._steps[name] = step

    def measure(self, backend: Backend[Any], enter: Any) -> dict[str, float]:
        """Return the newest means of what was logged since the last call. A collective."""
        newest: dict[str, int] = {}
        for steps in backend.world.gather(self._steps):
            newest |= {name: max(step, newest.get(name, step)) for name, step in steps.items()}
        self.logged.forget([name for name, step in self._steps.items() if step < newest[name]])
        self._steps.clear()
        result, sums = StepResult([]), dict[str, list[float]]()
        self.logged.attach(result)
        add(sums, backend.collect([result]))
        return means_of(sums)
