"""Ask for histograms of weights and gradients; computing and writing them belongs in `loggers/histograms.py`."""

from __future__ import annotations

from distributed.callbacks.base import Callback
from distributed.errors import ConfigError


class GradientHistogram(Callback):
    """Write histograms of weights and gradients to TensorBoard, as the setting `tensorboard_histograms` does.

    Args:
        every_n_steps: the number of updates between two histograms. None means once at the end of each epoch.

    Raises:
        ConfigError: `every_n_steps` is out of range. Before training: TensorBoard is off.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"every_n_steps={every_n_steps!r} must be 1 or more")
        self.every_n_steps = every_n_steps

    def is_due(self, step: int) -> bool:
        """Return whether histograms are written after update `step`, before any checkpoint of it."""
        return self.every_n_steps is not None and step % self.every_n_steps == 0
