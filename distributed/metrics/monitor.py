"""Judge metrics: find their best values, and check that the monitored metric is reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.config.merging import MergedConfig
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, nearest
from distributed.metrics.direction import is_larger_better
from distributed.metrics.of_keras import keras_classes
from distributed.metrics.over_all import OverAll

if TYPE_CHECKING:
    from distributed.state import Job

PREFIX = "val_"  # begins the name of every metric of a validation set, except in metrics.jsonl
# Names that the rows of a run use in addition to the user's metrics.
_OWN = frozenset({"loss", "learning_rate", "grad_norm", "samples_per_second", "step", "epoch", "time", "split"})
_ALWAYS = ("learning_rate", "samples_per_second")  # every row has these and the loss
_OF_VALIDATION = ("validate_every_n_steps", "validate_every_s", "validate_at_start", "max_validation_batches")
_NOT_JUDGED = {"epoch", "step", "learning_rate", "samples_per_second"}


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if a metric has a name that the rows of a run use for something else."""
    if taken := sorted(_OWN.intersection(names)):
        raise ConfigError(
            f"a metric cannot be called {taken[0]!r}, which rows of a run use for something else"
            f" ({', '.join(sorted(_OWN))}): give it another name"
        )


def best_metrics(
    rows: Sequence[Mapping[str, float]],
    config: DistributedConfig,
    metrics: Mapping[str, Any] | None = None,
    prefixes: Sequence[str] = (),
) -> dict[str, float]:
    """Return the best value in `rows` of each metric whose direction is known, by name. NaN values do not count.

    The direction of the monitored metric is `monitor_mode`; that of others comes from `is_larger_better`.

    Args:
        rows: metrics by name, one row per epoch or validation.
        config: the settings, for `monitor` and `monitor_mode`.
        metrics: the metrics of the Trainer, by name.
        prefixes: the prefix of the metrics of each validation set.
    """
    best: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in _NOT_JUDGED):
        own = _own_name(name, prefixes)
        is_max = config.monitor_mode == "max" if name == config.monitor else is_larger_better(own, metrics)
        values = [row[name] for row in rows if name in row and not math.isnan(row[name])]
        if is_max is not None and values:
            best[name] = (max if is_max else min)(values)
    return best


def check_monitor(merged: MergedConfig, prefixes: Sequence[str], job: Job | None = None) -> None:
    """Check before training that `monitor` can be reported and that its direction is known.

    Args:
        merged: the settings with their sources.
        prefixes: the prefix of the metrics of each validation set: "val_", "val_NAME_" for a set with a name, or none.
        job: the arguments of the Trainer, or None to check without the names of its metrics.

    Raises:
        ConfigError: the monitor cannot be reported, `monitor_mode` contradicts it or is missing, two metrics of validation sets
            would have the same name, or a setting needs validation data.
    """
    config = merged.config
    if not prefixes:
        _check_without_validation(merged)
    is_watched = config.keep_best or config.early_stopping_patience
    if is_watched and prefixes and PREFIX not in prefixes and not merged.is_given("monitor"):
        named = ", ".join(repr(f"{prefix}loss") for prefix in prefixes)
        raise ConfigError(
            f"validation sets with names need a monitor, which decides the best checkpoint: set monitor to one of {named},"
            " or another of their metrics"
        )
    if prefixes or not config.monitor.startswith(PREFIX):
        names = None if job is None else expected_names(job, prefixes)
        if names is not None and len(prefixes) > 1 and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two validation sets would both report {twice!r}: give one of them another name")
        is_of_no_set = config.monitor.startswith(PREFIX) and not config.monitor.startswith(tuple(prefixes))
        if names is None and is_watched and is_of_no_set:
            raise unknown_metric("monitor", config.monitor, [f"{prefix}loss" for prefix in prefixes])
        if names is not None and is_watched and not is_among(config.monitor, names, _with_several(job), prefixes):
            raise unknown_metric("monitor", config.monitor, names)
        _check_mode(merged, {} if job is None else job.metrics, prefixes)
        return
    _check_mode(merged, {} if job is None else job.metrics, prefixes)
    for name in ("early_stopping_patience", "keep_best"):
        if getattr(config, name) and (merged.is_given(name) or merged.is_given("monitor")):
            raise ConfigError(
                f"{name}={getattr(config, name)} watches {config.monitor!r}, but fit() got no validation data:"
                " pass val_data, or set monitor='loss'"
            )


def check_own_loop(merged: MergedConfig) -> None:
    """Check the settings about validation and monitors of a loop that the script runs.

    Raises:
        ConfigError: a setting would have no effect, or `monitor_mode` is needed.
    """
    for name in _OF_VALIDATION:
        if getattr(merged.config, name) and merged.is_given(name):
            raise ConfigError(
                f"{name}={getattr(merged.config, name)} has no effect in a loop of your own, where your code decides when to validate:"
                " drop it"
            )
    if merged.is_given("monitor"):
        _check_mode(merged, {}, (PREFIX,))


def _check_without_validation(merged: MergedConfig) -> None:
    """Raise ConfigError if a setting about validation was given, because there is no validation data."""
    for name in _OF_VALIDATION:
        if getattr(merged.config, name) and merged.is_given(name):
            raise ConfigError(
                f"{name}={getattr(merged.config, name)}, but fit() got no validation data: pass val_data, or drop {name}"
            )


def _check_mode(merged: MergedConfig, metrics: Mapping[str, Any], prefixes: Sequence[str]) -> None:
    """Raise ConfigError if `monitor_mode` is left at "min" although smaller values are not known to be better."""
    config = merged.config
    is_larger = is_larger_better(_own_name(config.monitor, prefixes), metrics)
    if config.monitor_mode != "min" or merged.is_given("monitor_mode") or is_larger is False:
        return
    if is_larger:
        raise ConfigError(
            f"monitor={config.monitor!r} is best when large, but monitor_mode is 'min': set monitor_mode='max' (or 'min' explicitly)"
        )
    raise ConfigError(
        f"monitor={config.monitor!r} does not say whether smaller or larger values are better"
        f"{nearest(config.monitor, [name for own in ('loss', *metrics) for name in (f'val_{own}', own)])}:"
        " set monitor_mode='max' or 'min'"
    )


def expected_names(job: Job, prefixes: Sequence[str]) -> list[str] | None:
    """Return the names that rows of this job can have, or None if the arguments of the Trainer do not determine them.

    The results of `training_step` and the metrics of a compiled Keras model are known only after the first update.
    """
    # A factory may create a compiled Keras model.
    is_factory = callable(job.model) and not hasattr(job.model, "parameters")
    if job.training_step is not None or is_factory or keras_classes(job.model):
        return None
    # Accuracy is reported if the targets are class indices.
    names = [*dict.fromkeys(["loss", "accuracy", *job.metrics])]
    return names_of(names, prefixes)


def _with_several(job: Job | None) -> list[str]:
    """Return the names of the metrics that may report several values, each as NAME_KEY."""
    metrics = {} if job is None else job.metrics
    return [name for name, metric in metrics.items() if _may_be_several(metric)]


def _may_be_several(metric: Any) -> bool:
    return isinstance(metric, OverAll) or hasattr(metric, "update") or hasattr(metric, "update_state")


def is_among(monitor: str, names: Iterable[str], several: Iterable[str], prefixes: Sequence[str]) -> bool:
    """Return whether `monitor` is in `names`, or can be one of the values that the metrics `several` report."""
    own = _own_name(monitor, prefixes)
    return monitor in names or any(own == name or own.startswith(f"{name}_") for name in several)


def _own_name(monitor: str, prefixes: Sequence[str]) -> str:
    """Return the name of the metric without the prefix of a validation set."""
    found = max((prefix for prefix in (*prefixes, PREFIX) if monitor.startswith(prefix)), key=len, default="")
    return monitor.removeprefix(found)


def uncertain(
    monitors: Iterable[str], metrics: Mapping[str, Any], *, prefixes: Sequence[str], known: Iterable[str]
) -> list[str]:
    """Return the monitors for which only the first update shows whether they are reported.

    Args:
        monitors: names of metrics.
        metrics: the metrics of the Trainer, by name.
        prefixes: the prefix of the metrics of each validation set.
        known: the names in earlier rows.
    """
    certain = {*names_of(["loss", *metrics], prefixes), *known}
    return [name for name in dict.fromkeys(monitors) if name not in certain]


def names_of(trained: Sequence[str], prefixes: Sequence[str]) -> list[str]:
    """Return the names that a row can have if training reports the names `trained`."""
    return [*(f"{prefix}{name}" for prefix in prefixes for name in trained), *trained, *_ALWAYS]


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
    """Raise ConfigError if neither `row` nor an `earlier` row has the monitor and `keep_best` needs it."""
    is_expected = config.keep_best and (is_validated or not config.monitor.startswith("val_"))
    if is_expected and not any(config.monitor in each for each in (row, *earlier)):
        raise unknown_metric("monitor", config.monitor, row)


def unknown_metric(field: str, name: str, metrics: Iterable[str]) -> ConfigError:
    """Return the error for a metric that is not reported. It lists the reported metrics and names the nearest one.

    Args:
        field: the setting that names the metric.
        name: the value of the setting.
        metrics: the names that are reported.
    """
    reported = [key for key in metrics if key not in ("epoch", "step")]
    return ConfigError(
        f"{field}={name!r} is not reported{nearest(name, reported)}: choose one of {', '.join(reported)}"
    )
