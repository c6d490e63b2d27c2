"""Which metrics are better large, which were the best, and what is said of a monitor that is not measured."""

from __future__ import annotations

import contextlib
import sys

import pytest

from distributed import over_all
from distributed.config.merging import Typed, merge
from distributed.errors import ConfigError
from distributed.metrics.monitor import best_metrics, check_monitor, check_reported, is_larger_better
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
    assert not is_larger_better(name)


@pytest.mark.parametrize("name", ["accuracy", "val_f1", "terror_f1", "maestro", "lossless_ratio", "mAP", "auc"])
def test_larger_is_better_elsewhere(name):
    assert is_larger_better(name)


def test_the_best_is_by_name_and_for_the_monitor_by_its_mode():
    config = merge(Typed(), {"monitor": "val_speed", "monitor_mode": "min"}).config
    rows = [
        {"epoch": 1, "step": 3, "val_loss": 2.0, "val_speed": 7.0, "val_f1": 0.5},
        {"epoch": 2, "step": 6, "val_loss": 3.0, "val_speed": 9.0, "val_f1": float("nan"), "learning_rate": 1.0},
    ]

    assert best_metrics(rows, config) == {"val_loss": 2.0, "val_speed": 7.0, "val_f1": 0.5}


def test_a_monitor_that_nobody_reports_is_named_with_the_nearest_that_is():
    config = merge(Typed(), {"monitor": "val_acuracy", "monitor_mode": "max"}).config

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
    merged = merge(Typed(), {"monitor": monitor, "monitor_mode": "max"})
    model = type("Model", (), {"parameters": None})()
    refused = contextlib.nullcontext() if is_possible else pytest.raises(ConfigError, match=f"{monitor!r} is not rep")
    with pytest.MonkeyPatch.context() as patch, refused:
        patch.delitem(sys.modules, "keras", raising=False)
        check_monitor(merged, [1], Job(model, metrics=metrics))


def test_a_metric_that_an_earlier_row_has_may_be_absent():
    config = merge(Typed(), {"monitor": "val_f1", "monitor_mode": "max"}).config
    row = {"epoch": 2, "step": 6, "val_loss": 1.0}
    check_reported(config, row, is_validated=True, earlier=[{"epoch": 1, "val_f1": 0.5}])
    with pytest.raises(ConfigError, match="'val_f1' is not reported"):
        check_reported(config, row, is_validated=True, earlier=[{"epoch": 1}])


def test_the_default_monitor_may_be_absent_where_nothing_is_validated():
    check_reported(merge(Typed(), {}).config, {"epoch": 1, "step": 3, "loss": 1.0}, is_validated=False)
    check_monitor(merge(Typed(), {}), None)


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
        check_monitor(merge(Typed(), settings), None)
    check_monitor(merge(Typed(), settings), [1])
