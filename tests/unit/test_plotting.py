"""The curves of a run, as a file and as a figure."""

from __future__ import annotations

import math
import pickle
import sys

import pytest

from distributed.errors import ConfigError, ResourceError
from distributed.runs.history import History
from distributed.runs.plotting import metric_names

pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")

ROWS = [
    {"epoch": 1, "step": 10, "loss": 2.0, "accuracy": 0.5, "val_loss": 2.5, "val_accuracy": 0.4, "learning_rate": 0.1},
    {"epoch": 2, "step": 20, "loss": 1.0, "accuracy": 0.8, "val_loss": 1.5, "val_accuracy": 0.7, "learning_rate": 0.1},
]


def history(rows: list[dict[str, float]]) -> History:
    return History(rows, {}, total_time=1.5, steps=20, run_dir="runs/digits-1")


def test_losses_are_on_one_axis_and_other_metrics_on_a_second():
    figure = history(ROWS).plot()

    lines = [{line.get_label(): list(line.get_ydata()) for line in axes.lines} for axes in figure.axes]
    assert lines == [
        {"loss": [2.0, 1.0], "val_loss": [2.5, 1.5]},
        {"accuracy": [0.5, 0.8], "val_accuracy": [0.4, 0.7]},
    ]
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "accuracy"]
    assert figure.get_suptitle() == "digits-1: 20 steps in 1.5 s"


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_suffix_chooses_the_format(tmp_path, suffix, magic):
    path = tmp_path / "new" / f"curves.{suffix}"

    history(ROWS).plot(str(path))

    assert path.read_bytes().startswith(magic)


def test_a_notebook_is_given_a_picture_without_pyplot():
    figure = history(ROWS).plot()

    assert figure._repr_png_().startswith(b"\x89PNG")
    assert type(pickle.loads(pickle.dumps(figure))) is type(figure)


@pytest.mark.parametrize("rows", [[], ROWS[:1], [{**ROWS[0], "loss": math.nan}]], ids=["none", "one", "nan"])
def test_short_and_broken_histories_can_be_drawn(tmp_path, rows):
    history(rows).plot(str(tmp_path / "curves.png"))

    assert (tmp_path / "curves.png").stat().st_size > 0


def test_metric_that_only_some_epochs_have_keeps_its_epochs():
    figure = history([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 1.0, "val_loss": 3.0}]).plot()

    twin = figure.axes[0].lines[1]
    assert (list(twin.get_xdata()), list(twin.get_ydata())) == ([2], [3.0])


def test_validation_follows_its_training_metric():
    assert metric_names([{"loss": 1, "top3": 1}, {"val_loss": 1, "val_other": 1}]) == [
        "loss", "val_loss", "top3", "val_other",
    ]  # fmt: skip


def test_unknown_suffix_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"curves\.xyz.*png"):
        history(ROWS).plot(str(tmp_path / "curves.xyz"))


def test_without_matplotlib_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "distributed.runs.shown_figure", raising=False)

    with pytest.raises(ResourceError, match=r"pip install 'distributed-trainer\[plot\]'"):
        history(ROWS).plot()


def test_no_global_state_of_matplotlib_is_touched(run_python, tmp_path):
    code = (
        "import sys; from distributed import History\n"
        "History([{'epoch': 1, 'loss': 1.0}], {}, 1.0).plot('curves.png')._repr_png_(); print('matplotlib.pyplot' in sys.modules)"
    )

    done = run_python(["-c", code], cwd=tmp_path)

    assert done.stdout == "False\n", done.output
