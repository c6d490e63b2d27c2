"""Which metrics are better large, which were the best, and what is said of a monitor that is not measured."""

from __future__ import annotations

import contextlib
import functools
import sys

import pytest

from distributed import over_all
from distributed.config.merging import Overrides, merge
from distributed.errors import ConfigError
from distributed.metrics.direction import is_larger_better
from distributed.metrics.monitor import best_metrics, check_monitor, check_reported
from distributed.state import Job


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "val_loss",
        "WER",
        "val/wer",
        "FID",
        "valLoss",
        "RMSE",
        "val_cross_entropy",
        "top5Error",
        "err-rate",
        "PPL",
    ],
)
def test_smaller_is_better_where_a_whole_word_says_so(name):
    assert is_larger_better(name) is False


@pytest.mark.parametrize(
    "name", ["accuracy", "val_f1", "terror_f1", "mAP", "auc", "val_R2", "top5", "F1Score", "d_prime_score"]
)
def test_larger_is_better_where_a_whole_word_says_so(name):
    assert is_larger_better(name) is True


@pytest.mark.parametrize(
    "name", ["maestro", "lossless_ratio", "plainnorm", "val_std", "neg_mean_squared_error", "my", ""]
)
def test_other_names_say_nothing(name):
    assert is_larger_better(name) is None


class SparseCategoricalCrossentropy:
    """Named as Keras's."""


def mean_squared_error(outputs, targets):
    return 0.0


def test_the_object_or_function_says_what_the_name_does_not():
    torchmetrics = pytest.importorskip("torchmetrics")
    metrics = {
        "ce": SparseCategoricalCrossentropy(),
        "how_far": mean_squared_error,
        "whole": over_all(functools.partial(mean_squared_error)),
        "score_of_tm": torchmetrics.MeanSquaredError(),
        "tm": torchmetrics.R2Score(),
        "both": torchmetrics.MetricCollection({"a": torchmetrics.MeanSquaredError(), "b": torchmetrics.R2Score()}),
        "v": over_all(lambda outputs, targets: 1.0),
        "pearson": torchmetrics.PearsonCorrCoef(),
    }
    found = {name: is_larger_better(f"val_{name}", metrics) for name in [*metrics, "both_a", "both_b", "ce_more"]}
    assert found == {
        "ce": False, "how_far": False, "whole": False, "score_of_tm": False, "tm": True, "both": None, "v": None, "pearson": True,
        "both_a": False, "both_b": True, "ce_more": None,
    }  # fmt: skip


def test_no_best_is_claimed_where_the_direction_is_unknown():
    config = merge(Overrides(), {}).config
    rows = [
        {"epoch": 1, "val_ce": 0.4, "val_v": 1.0, "val_f1": 0.1},
        {"epoch": 2, "val_ce": 0.3, "val_v": 2.0, "val_f1": 0.2},
    ]
    assert best_metrics(rows, config, {"ce": SparseCategoricalCrossentropy()}) == {"val_ce": 0.3, "val_f1": 0.2}


def test_a_misspelt_monitor_is_told_before_its_mode_is_asked_for():
    model = type("Model", (), {"parameters": None})()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "keras", raising=False)
        for name in ("val_los", "val_acuracy"):
            with pytest.raises(ConfigError, match=f"{name!r} is not reported .did you mean"):
                check_monitor(merge(Overrides(), {"monitor": name}), ["val_"], Job(model))
        with pytest.raises(ConfigError, match="does not say whether") as error:
            check_monitor(
                merge(Overrides(), {"monitor": "val_v"}), ["val_"], Job(model, metrics={"v": lambda o, t: 0.0})
            )
        assert "'val_v' does not say whether smaller or larger values are better" in str(error.value)
        with pytest.raises(ConfigError, match=r"better \(did you mean 'val_loss'\?\): set monitor_mode"):
            check_monitor(
                merge(Overrides(), {"monitor": "val_los"}), ["val_"], Job(model, training_step=lambda m, b: 0.0)
            )
        metrics = {"ce": SparseCategoricalCrossentropy()}
        check_monitor(merge(Overrides(), {"monitor": "val_ce"}), ["val_"], Job(model, metrics=metrics))


def test_the_best_is_by_name_and_for_the_monitor_by_its_mode():
    config = merge(Overrides(), {"monitor": "val_speed", "monitor_mode": "min"}).config
    rows = [
        {"epoch": 1, "step": 3, "val_loss": 2.0, "val_speed": 7.0, "val_f1": 0.5},
        {"epoch": 2, "step": 6, "val_loss": 3.0, "val_speed": 9.0, "val_f1": float("nan"), "learning_rate": 1.0},
    ]

    assert best_metrics(rows, config) == {"val_loss": 2.0, "val_speed": 7.0, "val_f1": 0.5}


def test_a_monitor_that_nobody_reports_is_named_with_the_nearest_that_is():
    config = merge(Overrides(), {"monitor": "val_acuracy", "monitor_mode": "max"}).config

    with pytest.raises(ConfigError, match=r"'val_acuracy' is not reported \(did you mean 'val_accuracy'\?\): choose"):
        check_reported(config, {"epoch": 1, "step": 3, "loss": 1.0, "val_accuracy": 0.5}, is_validated=True)


@pytest.mark.parametrize(
    ("monitor", "is_possible"),
    [
        ("val_f1", True),
        ("val_pr_recall", True),
        ("pr", True),
        ("val_loss", True),
        ("val_los", False),
        ("val_prx", False),
        ("val_f1_micro", False),
    ],
)
def test_metrics_that_may_report_several_values_leave_only_their_own_names_open(monitor, is_possible):
    metrics = {"f1": lambda outputs, targets: 0.0, "pr": over_all(lambda outputs, targets: {"recall": 0.5})}
    merged = merge(Overrides(), {"monitor": monitor, "monitor_mode": "max"})
    model = type("Model", (), {"parameters": None})()
    refused = contextlib.nullcontext() if is_possible else pytest.raises(ConfigError, match=f"{monitor!r} is not rep")
    with pytest.MonkeyPatch.context() as patch, refused:
        patch.delitem(sys.modules, "keras", raising=False)
        check_monitor(merged, ["val_"], Job(model, metrics=metrics))


def test_a_metric_that_an_earlier_row_has_may_be_absent():
    config = merge(Overrides(), {"monitor": "val_f1", "monitor_mode": "max"}).config
    row = {"epoch": 2, "step": 6, "val_loss": 1.0}
    check_reported(config, row, is_validated=True, earlier=[{"epoch": 1, "val_f1": 0.5}])
    with pytest.raises(ConfigError, match="'val_f1' is not reported"):
        check_reported(config, row, is_validated=True, earlier=[{"epoch": 1}])


def test_the_default_monitor_may_be_absent_where_nothing_is_validated():
    check_reported(merge(Overrides(), {}).config, {"epoch": 1, "step": 3, "loss": 1.0}, is_validated=False)
    check_monitor(merge(Overrides(), {}), [])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"early_stopping_patience": 2}, "early_stopping_patience=2"),
        ({"keep_best": True}, "keep_best=True"),
        ({"monitor": "val_wer"}, "keep_best=True"),
    ],
)
def test_what_watches_validation_needs_validation_data(settings, name):
    with pytest.raises(ConfigError, match=f"{name} watches 'val_.*pass val_data, or set monitor='loss'"):
        check_monitor(merge(Overrides(), settings), [])
    check_monitor(merge(Overrides(), settings), ["val_"])
