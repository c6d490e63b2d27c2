"""Judge metrics: which values are better, which were best, and whether the monitored metric is reported."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.config.merging import MergedConfig
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, nearest
from distributed.metrics.over_all import OverAll

if TYPE_CHECKING:
    from distributed.state import Job

_SMALLER_IS_BETTER = {
    "loss", "losses", "logloss", "error", "errors", "err", "mse", "rmse", "mae", "mape", "msle", "rmsle", "nll",
    "perplexity", "ppl", "bpc", "bpb", "entropy", "crossentropy", "divergence", "kl", "distance", "regret",
    "wer", "cer", "ter", "eer", "ece", "brier", "fid", "kid", "lpips",
}  # fmt: skip
# Names that rows of a run use for something other than a metric of the user.
_OWN = frozenset({"loss", "learning_rate", "grad_norm", "samples_per_second", "step", "epoch", "time", "split"})
_ALWAYS = ("learning_rate", "samples_per_second")  # in every row, beside the loss
_NOT_JUDGED = {"epoch", "step", "learning_rate", "samples_per_second"}
# A word in a name: all capitals, or lower case with or without a first capital.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError for a metric whose name the rows of a run use for something else."""
    if taken := sorted(_OWN.intersection(names)):
        raise ConfigError(
            f"a metric cannot be called {taken[0]!r}, which rows of a run use for something else"
            f" ({', '.join(sorted(_OWN))}): give it another name"
        )


def is_larger_better(name: str) -> bool:
    """Return whether a larger value of `name` is better.

    It is not where a word of the name says so: loss, error, distance and the like.
    """
    return not _SMALLER_IS_BETTER.intersection(word.lower() for word in _WORD.findall(name))


def best_metrics(rows: Sequence[Mapping[str, float]], config: DistributedConfig) -> dict[str, float]:
    """Return name -> the best of its values in `rows`.

    `monitor_mode` says what is best for the monitored metric, `is_larger_better` for all others.
    """
    best: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name in _NOT_JUDGED or math.isnan(value):
                continue
            is_max = config.monitor_mode == "max" if name == config.monitor else is_larger_better(name)
            best[name] = (max if is_max else min)(best.get(name, value), value)
    return best


def check_monitor(merged: MergedConfig, val_data: Any, job: Job | None = None) -> None:
    """Check the monitor as far as it is known before training. Raises ConfigError."""
    config = merged.config
    if is_larger_better(config.monitor) and config.monitor_mode == "min" and not merged.is_typed("monitor_mode"):
        raise ConfigError(
            f"monitor={config.monitor!r} is best when large, and monitor_mode is 'min': set monitor_mode='max' (or 'min' explicitly)"
        )
    if val_data is not None or not config.monitor.startswith("val_"):
        names = None if job is None else expected_names(job, is_validated=val_data is not None)
        is_watched = config.keep_best or config.early_stopping_patience
        if names is not None and is_watched and not is_among(config.monitor, names, _with_several(job)):
            raise unknown_metric("monitor", config.monitor, names)
        return
    for name in ("early_stopping_patience", "keep_best"):
        if getattr(config, name) and (merged.is_typed(name) or merged.is_typed("monitor")):
            raise ConfigError(
                f"{name}={getattr(config, name)} watches {config.monitor!r}, and fit() got no validation data:"
                " pass val_data, or set monitor='loss'"
            )


def expected_names(job: Job, *, is_validated: bool) -> list[str] | None:
    """Return the names that rows of this job can have, or None where the arguments of the Trainer do not tell.

    What `training_step` returns and the metrics of a compiled Keras model are known only when they are measured.
    """
    is_factory = callable(job.model) and not hasattr(job.model, "parameters")  # it may make a compiled Keras model
    if job.training_step is not None or is_factory or "keras" in sys.modules:
        return None
    names = [*dict.fromkeys(["loss", "accuracy", *job.metrics])]  # accuracy is reported for class indices
    return [*(f"val_{name}" for name in names if is_validated), *names, *_ALWAYS]


def _with_several(job: Job | None) -> list[str]:
    """Return the names of the metrics that may report several values, each as NAME_KEY."""
    metrics = {} if job is None else job.metrics
    return [name for name, metric in metrics.items() if _may_be_several(metric)]


def _may_be_several(metric: Any) -> bool:
    return isinstance(metric, OverAll) or hasattr(metric, "update") or hasattr(metric, "update_state")


def is_among(monitor: str, names: Iterable[str], several: Iterable[str]) -> bool:
    """Return whether `monitor` is one of `names`, or may be one of the values of the metrics `several`."""
    own = monitor.removeprefix("val_")
    return monitor in names or any(own == name or own.startswith(f"{name}_") for name in several)


def uncertain(
    monitors: Iterable[str], metrics: Mapping[str, Any], *, is_validated: bool, known: Iterable[str]
) -> list[str]:
    """Return those of `monitors` that only the first update can show to be reported.

    The others are named in the arguments of the Trainer, or in `known`, the names of earlier rows.
    """
    given = ["loss", *metrics]
    certain = {*given, *_ALWAYS, *known, *(f"val_{name}" for name in given if is_validated)}
    return [name for name in dict.fromkeys(monitors) if name not in certain]


def names_of(trained: Sequence[str], *, is_validated: bool) -> list[str]:
    """Return the names that a row can have if training reports `trained`."""
    return [*(f"val_{name}" for name in trained if is_validated), *trained, *_ALWAYS]


def not_yet_reported(name: str, names: Iterable[str]) -> str:
    """Return the warning for a monitor that the first update does not report and a later one may report."""
    return (
        f"monitor={name!r} is not reported by the first update{nearest(name, list(names))}: it reports"
        f" {', '.join(names)}. Training ends with an error after the first epoch if that epoch does not report it either"
    )


def check_reported(
    config: DistributedConfig,
    row: Mapping[str, float],
    is_validated: bool,
    earlier: Iterable[Mapping[str, float]] = (),
) -> None:
    """Raise ConfigError for a monitor that neither `row` nor an `earlier` one has: no best checkpoint could be kept."""
    is_expected = config.keep_best and (is_validated or not config.monitor.startswith("val_"))
    if is_expected and not any(config.monitor in each for each in (row, *earlier)):
        raise unknown_metric("monitor", config.monitor, row)


def unknown_metric(field: str, name: str, metrics: Iterable[str]) -> ConfigError:
    """Return the error for a metric that is not reported. It names the nearest reported metric, and all of them."""
    reported = [key for key in metrics if key not in ("epoch", "step")]
    return ConfigError(
        f"{field}={name!r} is not reported{nearest(name, reported)}: choose one of {', '.join(reported)}"
    )
