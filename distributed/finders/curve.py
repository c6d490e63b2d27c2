"""LearningRateCurve: the loss while the learning rate rises, and the rate that it suggests.

The range test is Smith's ("Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, section 3.3). Like
fastai and Lightning, we suggest the rate at which the loss falls steepest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError

# A loss has diverged if its running mean exceeds the lowest running mean by more than this factor times that mean. For a
# positive loss this is four times the lowest mean.
_FACTOR = 3.0
_DECAY = 0.9  # decay of the running mean


@dataclasses.dataclass(frozen=True)
class LearningRateCurve:
    """Result of `Trainer.find_learning_rate`: the loss of each update and its learning rate.

    Attributes:
        rates: values of the setting `learning_rate`, before `lr_scaling`.
        losses: the loss of each update.
        num_steps: the number of updates requested. Fewer were made if the loss diverged.
    """

    rates: list[float]
    losses: list[float]
    num_steps: int

    @property
    def suggestion(self) -> float:
        """The rate at which the loss falls steepest over the logarithm of the rate, up to the rate of the lowest loss.

        Raises:
            ConfigError: the first loss is not finite, the loss diverged too early, or it never falls by more than its noise.
        """
        half = self._half_window
        lines = self.lines
        if not self.losses:
            raise ConfigError(
                "the loss is NaN or infinite at the first update, before any rate had an effect: check the model, the loss and the data"
            )
        if len(lines) <= half:
            raise ConfigError(
                f"the loss diverged after {len(self.losses)} updates, at rate {self.rates[-1]:.3g}: lower min_rate"
            )
        lowest = min(range(len(lines)), key=lambda i: lines[i].mean)
        falling = lines[: lowest + 1]  # without the rise after the lowest loss, which is not noise
        # Standard error of the mean loss of a window.
        noise = math.sqrt(sum(line.variance for line in falling) / len(falling) / (2 * half + 1))
        steepest = min(range(len(falling)), key=lambda i: falling[i].slope)
        if lines[0].mean - lines[lowest].mean <= 5 * noise or lines[steepest].slope >= 0:
            raise ConfigError(
                f"the loss does not fall anywhere between the rates {self.rates[0]:.3g} and {self.rates[-1]:.3g}:"
                " try a wider range (min_rate, max_rate), more updates (num_steps), or a larger batch"
            )
        return self.rates[steepest + half]

    @property
    def lines(self) -> list[FittedLine]:
        """Straight lines through the losses around each update that has enough losses on both sides."""
        width = 2 * self._half_window + 1
        return [fit_line(self.losses[i : i + width]) for i in range(len(self.losses) - width + 1)]

    @property
    def smoothed_rates(self) -> list[float]:
        """The rate at the centre of each of `lines`."""
        return self.rates[self._half_window : len(self.rates) - self._half_window]

    @property
    def _half_window(self) -> int:
        return max(2, self.num_steps // 20)

    def plot(self, path: str | None = None) -> Any:
        """Plot the losses over the rates. Any process may call it.

        Args:
            path: the file to save the figure to, in the format of its suffix (png, svg, pdf), or None. Only the main process
                should write it.

        Returns:
            The matplotlib figure.

        Raises:
            ResourceError: matplotlib is missing.
            ConfigError: the suffix is not known.
        """
        from distributed.runs.plotting import new_figure, save_figure

        figure = new_figure(5.0)
        axes = figure.add_subplot()
        axes.plot(self.rates, self.losses, ".", color="C0", alpha=0.4, label="loss")
        axes.plot(self.smoothed_rates, [line.mean for line in self.lines], color="C0", label="smoothed")
        with contextlib.suppress(ConfigError):  # without a suggestion, the curve shows why
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
        if path is not None:
            save_figure(figure, Path(path))
        return figure


@dataclasses.dataclass(frozen=True)
class FittedLine:
    """A least-squares line through some losses."""

    mean: float
    slope: float  # change of the loss per update; each update raises the rate's logarithm by the same amount
    variance: float  # variance of the residuals


def fit_line(losses: Sequence[float]) -> FittedLine:
    """Return the least-squares line through an odd number of losses, one per update."""
    half = len(losses) // 2
    mean = math.fsum(losses) / len(losses)
    offsets = range(-half, half + 1)
    slope = math.fsum(i * loss for i, loss in zip(offsets, losses, strict=True)) / sum(i * i for i in offsets)
    rest = math.fsum((loss - mean - slope * i) ** 2 for i, loss in zip(offsets, losses, strict=True))
    return FittedLine(mean, slope, rest / (len(losses) - 2))


class Divergence:
    """Detect that the running mean of a loss is far above its lowest value."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0
        self._best = math.inf

    def add(self, loss: float) -> bool:
        """Add a loss and return whether it has diverged."""
        if not math.isfinite(loss):
            return True
        self._sum = _DECAY * self._sum + (1 - _DECAY) * loss
        self._weight = _DECAY * self._weight + (1 - _DECAY)
        mean = self._sum / self._weight
        self._best = min(self._best, mean)
        return mean > self._best + _FACTOR * abs(self._best)
