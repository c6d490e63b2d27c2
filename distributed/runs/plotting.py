"""Draw the curves of a run. matplotlib is loaded when a plot is asked for; its global state is not used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distributed.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from distributed.runs.shown_figure import ShownFigure
    from distributed.runs.history import History

# The names in a row that are not metrics: the position and the speed of training.
_BOOKKEEPING = frozenset(
    {"epoch", "step", "steps", "time", "seconds", "samples_seen", "samples_per_second", "learning_rate", "grad_norm"}
)
_VAL = "val_"


def plot_history(history: History, path: str | Path | None = None) -> Figure:
    """Draw the loss over the epochs, and beside it all other metrics. Curves of validation are dashed.

    Return the matplotlib figure, which a notebook shows as the value of a cell.

    Args:
        history: what `fit` returned.
        path: the file to save the figure to, in the format of its suffix (png, svg, pdf), or None. As with every file,
            only the main process should write it.

    Raises:
        ResourceError: matplotlib is missing.
        ConfigError: the suffix is not known.
    """
    names = metric_names(history.rows)
    losses = [name for name in names if _base(name) == "loss"]
    others = [name for name in names if _base(name) != "loss"]
    plots = [names for names in (losses, others) if names]
    figure = new_figure(5.0 * max(1, len(plots)))
    figure.suptitle(_title(history))
    for position, shown in enumerate(plots):
        axes = figure.add_subplot(1, len(plots), position + 1)
        _draw(axes, history.rows, shown)
    if path is not None:
        save_figure(figure, Path(path))
    return figure


def new_figure(width: float) -> ShownFigure:
    """Return an empty figure, `width` inches wide. Raises ResourceError without matplotlib."""
    try:
        from distributed.runs.shown_figure import ShownFigure
    except ImportError:
        raise ResourceError(
            "plot() needs matplotlib, which is not installed: run pip install 'distributed-trainer[plot]'"
        ) from None
    return ShownFigure(figsize=(width, 3.8), layout="constrained")


def metric_names(rows: Sequence[dict[str, float]]) -> list[str]:
    """Return the metrics of the rows in order of appearance, each followed by its validation twin."""
    seen = list(dict.fromkeys(name for row in rows for name in row if name not in _BOOKKEEPING))
    bases = list(dict.fromkeys(map(_base, seen)))
    return [name for base in bases for name in (base, _VAL + base) if name in seen]


def _base(name: str) -> str:
    return name.removeprefix(_VAL)


def _title(history: History) -> str:
    run = Path(history.run_dir).name if history.run_dir else "run"
    return f"{run}: {history.steps} steps in {history.total_time:.1f} s"


def _draw(axes: Axes, rows: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    """Draw one line per metric, over the epochs, or over the steps if an epoch has several rows. Validation metrics are dashed."""
    from matplotlib.ticker import MaxNLocator

    epochs = [row.get("epoch", i + 1) for i, row in enumerate(rows)]
    is_by_steps = len(set(epochs)) < len(epochs)
    x = [row["step"] for row in rows] if is_by_steps else epochs
    for position, name in enumerate(names):
        where = [at for at, row in zip(x, rows, strict=True) if name in row]
        values = [row[name] for row in rows if name in row]
        style = "--" if name.startswith(_VAL) else "-"
        axes.plot(where, values, style, color=f"C{position}", marker="o", markersize=3, label=name)
    axes.set_xlabel("step" if is_by_steps else "epoch")
    axes.set_ylabel(_base(names[0]) if len({_base(name) for name in names}) == 1 else "metric")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.legend()


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` to `path` in the format of its suffix. Raises ConfigError for an unknown suffix."""
    formats = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix.lstrip(".") not in formats:
        raise ConfigError(f"plot path {str(path)!r} has no known suffix: end it with one of {', '.join(formats)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
