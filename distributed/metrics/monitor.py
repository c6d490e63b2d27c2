"""Metrics that are judged: which values are better, which were the best, and whether the monitored one can be there."""

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
# What a row of a run says beside the metrics of its user.
_OWN = frozenset({"loss", "learning_rate", "grad_norm", "samples_per_second", "step", "epoch", "time", "split"})
_ALWAYS = ("learning_rate", "samples_per_second")  # of every row, beside the loss
_NOT_JUDGED = {"epoch", "step", "learning_rate", "samples_per_second"}
# A word in a name: of one case, or with a capital first.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def check_names(names: Iterable[str]) -> None:
    """ConfigError for a metric of the user's that is named as something else in the rows of a run."""
    if taken := sorted(_OWN.intersection(names)):
        raise ConfigError(
            f"a metric cannot be called {taken[0]!r}, which rows of a run use for something else"
            f" ({', '.join(sorted(_OWN))}): give it another name"
        )


def is_larger_better(name: str) -> bool:
    """Whether a larger value of `name` is better: not where one of its words says loss, error, distance and the like."""
    return not _SMALLER_IS_BETTER.intersection(word.lower() for word in _WORD.findall(name))


def best_metrics(rows: Sequence[Mapping[str, float]], config: DistributedConfig) -> dict[str, float]:
    """name -> its best value in `rows`; for the monitored metric `monitor_mode` says which that is."""
    best: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name in _NOT_JUDGED or math.isnan(value):
                continue
            is_max = config.monitor_mode == "max" if name == config.monitor else is_larger_better(name)
            best[name] = (max if is_max else min)(best.get(name, value), value)
    return best


def check_monitor(merged: MergedConfig, val_data: Any, job: Job | None = None) -> None:
    """Check what is known of the monitor before training. Raises ConfigError."""
    config = merged.config
    if is_larger_better(config.monitor) and config.monitor_mode == "min" and not merged.is_typed("monitor_mode"):
        raise ConfigError(
            f"monitor={config.monitor!r} is best when large, and monitor_mode is 'min': set monitor_mode='max' (or 'min' explicitly)"
        )
    if val_data is not None or not config.monitor.startswith("val_"):
        names = None if job is None else expected_names(job, is_validated=val_data is not None)
        if names is not None and config.monitor not in names and (config.keep_best or config.early_stopping_patience):
            raise unknown_metric("monitor", config.monitor, names)
        return
    for name in ("early_stopping_patience", "keep_best"):
        if getattr(config, name) and (merged.is_typed(name) or merged.is_typed("monitor")):
            raise ConfigError(
                f"{name}={getattr(config, name)} watches {config.monitor!r}, and fit() got no validation data:"
                " pass val_data, or set monitor='loss'"
            )


def expected_names(job: Job, *, is_validated: bool) -> list[str] | None:
    """The names that rows of this job can have, as far as the arguments of the Trainer tell; None where they do not.

    What `training_step` returns, the metrics of a compiled Keras model and those of an object that keeps a state of its own
    are known only when they are measured.
    """
    is_factory = callable(job.model) and not hasattr(job.model, "parameters")  # of a compiled Keras model, perhaps
    if job.training_step is not None or is_factory or "keras" in sys.modules or not are_functions(job.metrics):
        return None
    names = [*dict.fromkeys(["loss", "accuracy", *job.metrics])]  # accuracy: where targets are class indices
    return [*(f"val_{name}" for name in names if is_validated), *names, *_ALWAYS]


def are_functions(metrics: Mapping[str, Any]) -> bool:
    """Whether each metric is a plain function, which is reported under its name; others may report several names."""
    return not any(
        isinstance(metric, OverAll) or hasattr(metric, "update") or hasattr(metric, "update_state")
        for metric in metrics.values()
    )


def uncertain(
    monitors: Iterable[str], metrics: Mapping[str, Any], *, is_validated: bool, known: Iterable[str]
) -> list[str]:
    """Those of `monitors` that the first update has yet to show to be reported; `known` are the names of earlier rows."""
    if not are_functions(metrics):
        return []
    given = ["loss", *metrics]
    certain = {*given, *_ALWAYS, *known, *(f"val_{name}" for name in given if is_validated)}
    return [name for name in dict.fromkeys(monitors) if name not in certain]


def check_reported(config: DistributedConfig, row: Mapping[str, float], is_validated: bool) -> None:
    """The first row shows whether the monitor is measured at all; without it no best checkpoint could be kept."""
    is_expected = config.keep_best and (is_validated or not config.monitor.startswith("val_"))
    if is_expected and config.monitor not in row:
        raise unknown_metric("monitor", config.monitor, row)


def unknown_metric(field: str, name: str, metrics: Iterable[str]) -> ConfigError:
    """The error for a metric that nobody reports, with the nearest and all of those that are reported."""
    reported = [key for key in metrics if key not in ("epoch", "step")]
    return ConfigError(
        f"{field}={name!r} is not reported{nearest(name, reported)}: choose one of {', '.join(reported)}"
    )
