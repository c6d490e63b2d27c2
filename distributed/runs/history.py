"""History: the result of `fit`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from distributed.state import TrainState


@dataclasses.dataclass(repr=False)
class History:
    """The result of `fit`: one row per epoch (also for an epoch that `max_steps` cut off) and the best values.

    With `validate_every_n_steps` or `validate_every_s` there is one row per validation instead.

    Attributes:
        rows: the metrics of each row by name, with `step`, `epoch` and the prefix `val_` for validation.
        best_metrics: the best value of each metric.
        total_time: the time in seconds, over all attempts.
        steps: the number of optimizer updates.
        run_dir: the run directory.
        stop_reason: why training ended early, or None.
    """

    rows: list[dict[str, float]]
    best_metrics: dict[str, float]
    total_time: float
    steps: int = 0
    run_dir: str | None = None
    stop_reason: str | None = None

    @classmethod
    def of(cls, state: TrainState, run_dir: str, total_time: float) -> History:
        """Return the history of a run whose last state is `state`."""
        return cls(list(state.rows), dict(state.best), total_time, state.step, run_dir, state.stop_reason)

    def __repr__(self) -> str:
        epochs = int(self.rows[-1]["epoch"]) if self.rows else 0
        best = {n: v for n, v in self.best_metrics.items() if n.startswith("val_")}
        parts = [
            f"{epochs} epoch{'s' * (epochs != 1)}", f"{self.steps} step{'s' * (self.steps != 1)}", f"in {self.total_time:.1f} s",
            *(f"best {name} {value:.4g}" for name, value in list((best or self.best_metrics).items())[:2]),
        ]  # fmt: skip
        named = {"stop_reason": self.stop_reason, "run_dir": self.run_dir}
        parts += [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"History({', '.join(parts)})"

    @property
    def best_accuracy(self) -> float:
        """The best validation accuracy of all validation sets, or else the best training `accuracy`.

        NaN if there is neither.
        """
        best = self.best_metrics
        of_sets = [value for name, value in best.items() if name.startswith("val_") and name.endswith("_accuracy")]
        return max(of_sets) if of_sets else best.get("accuracy", float("nan"))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame, one row per entry of `rows`. Raises ImportError if pandas is missing."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self, path: str | None = None) -> Any:
        """Draw the curves of the loss and of the metrics over the epochs. Any process may call it.

        Args:
            path: the file to save the figure to, in the format of its suffix (png, svg, pdf), or None. Only the main process should
                write it.

        Returns:
            The matplotlib figure, which a notebook shows as the value of a cell.

        Raises:
            ResourceError: matplotlib is missing.
            ConfigError: the suffix is not known.
        """
        from distributed.runs.plotting import plot_history

        return plot_history(self, path)
