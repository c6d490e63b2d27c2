"""History: what `fit` returns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from distributed.state import TrainState


@dataclasses.dataclass(repr=False)
class History:
    """What `fit` returns: one row per epoch (also of the one that `max_steps` cut off) and what was best."""

    rows: list[dict[str, float]]
    best_metrics: dict[str, float]
    total_time: float  # seconds, of all attempts
    steps: int = 0
    run_dir: str | None = None
    stop_reason: str | None = None

    @classmethod
    def of(cls, state: TrainState, run_dir: str, total_time: float) -> History:
        """Return the history of a run that ended, or was saved, in `state`."""
        return cls(list(state.rows), dict(state.best), total_time, state.step, run_dir, state.stop_reason)

    def __repr__(self) -> str:
        epochs, best = len(self.rows), {n: v for n, v in self.best_metrics.items() if n.startswith("val_")}
        parts = [
            f"{epochs} epoch{'s' * (epochs != 1)}", f"{self.steps} step{'s' * (self.steps != 1)}", f"in {self.total_time:.1f} s",
            *(f"best {name} {value:.4g}" for name, value in list((best or self.best_metrics).items())[:2]),
        ]  # fmt: skip
        named = {"stop_reason": self.stop_reason, "run_dir": self.run_dir}
        parts += [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"History({', '.join(parts)})"

    @property
    def best_accuracy(self) -> float:
        """The best `val_accuracy`, or the best training `accuracy` if nothing was validated, or NaN without either."""
        return self.best_metrics.get("val_accuracy", self.best_metrics.get("accuracy", float("nan")))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a data frame, one per epoch. Needs pandas."""
        import pandas

        return pandas.DataFrame(self.rows)

    def plot(self, path: str | None = None) -> Any:
        """Draw the loss and metric curves over the epochs as a matplotlib figure, and save it to `path` if given.

        Needs matplotlib.
        """
        from distributed.runs.plotting import plot_history

        return plot_history(self, path)
