"""Judge metrics: find their best values, and check that the monitored metric is reported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.config.merging import MergedConfig
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError, nearest
from distributed.metrics.direction import is_larger_better
from distributed.metrics.over_all import OverAll

if TYPE_CHECKING:
    from distributed.state import Job

# Names that rows of a run use beside the user's metrics.
_OWN = frozenset({"loss", "learning_rate", "grad_norm", "samples_per_second", "step", "epoch", "time", "split"})
_ALWAYS = ("learning_rate", "samples_per_second")  # in every row, beside the loss
_NOT_JUDGED = {"epoch", "step", "learning_rate", "samples_per_second"}


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if a metric has a name that the rows of a run use for something else."""
    if taken := sorted(_OWN.intersection(names)):
        raise ConfigError(
            f"a metric cannot be called {taken[0]!r}, which rows of a run use for something else"
            f" ({', '.join(sorted(_OWN))}): give it another name"
        )


def best_metrics(
    rows: Sequence[Mapping[str, float]], config: DistributedConfig, metrics: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return the best value in `rows` of each metric whose direction is known, by name. NaN values do not count.

    The direction of the monitored metric is `monitor_mode`; that of others comes from `is_larger_better`.

    Args:
        rows: metrics by name, one row per epoch.
        config: the settings, for `monitor` and `monitor_mode`.
        metrics: the metrics of the Trainer, by name.
    """
    best: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in _NOT_JUDGED):
        is_max = config.monitor_mode == "max" if name == config.monitor else is_larger_better(name, metrics)
        values = [row[name] for row in rows if name in row and not math.isnan(row[name])]
        if is_max is not None and values:
            best[name] = (max if is_max else min)(values)
    return best


def check_monitor(merged: MergedConfig, val_data: Any, job: Job | None = None) -> None:
    """Check before training that `monitor` can be reported and that its direction is known.

    Args:
        merged: the settings with their sources.
        val_data: the validation data of `fit`, or None.
        job: the arguments of the Trainer, or None to check without the names of its metrics.

    Raises:
        ConfigError: the monitor cannot be reported, or `monitor_mode` contradicts it or is needed.
    """
    config = merged.config
    if val_data is not None or not config.monitor.startswith("val_"):
        names = None if job is None else expected_names(job, is_validated=val_data is not None)
        is_watched = config.keep_best or config.early_stopping_patience
        if names is not None and is_watched and not is_among(config.monitor, names, _with_several(job)):
            raise unknown_metric("monitor", config.monitor, names)
        _check_mode(merged, {} if job is None else job.metrics)
        return
    _check_mode(merged, {} if job is None else job.metrics)
    for name in ("early_stopping_patience", "keep_best"):
        if getattr(config, name) and (merged.is_given(name) or merged.is_given("monitor")):
            raise ConfigError(
                f"{name}={getattr(config, name)} watches {config.monitor!r}, but fit() got no validation data:"
                " pass val_data, or set monitor='loss'"
            )


def _check_mode(merged: MergedConfig, metrics: Mapping[str, Any]) -> None:
    """Raise ConfigError if `monitor_mode` is left at "min" although smaller values are not known to be better."""
    config = merged.config
    is_larger = is_larger_better(config.monitor, metrics)
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


def expected_names(job: Job, *, is_validated: bool) -> list[str] | None:
    """Return the names that rows of this job can have, or None if the arguments of the Trainer do not determine them.

    The results of `training_step` and the metrics of a compiled Keras model are known only after the first update.
    """
    is_factory = callable(job.model) and not hasattr(job.model, "parameters")  # it may make a compiled Keras model
    is_of_keras = any(cls.__module__.startswith("keras.") for cls in type(job.model).__mro__)
    if job.training_step is not None or is_factory or is_of_keras:
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
    """Return whether `monitor` is in `names`, or can be one of the values that the metrics `several` report."""
    own = monitor.removeprefix("val_")
    return monitor in names or any(own == name or own.startswith(f"{name}_") for name in several)


def uncertain(
    monitors: Iterable[str], metrics: Mapping[str, Any], *, is_validated: bool, known: Iterable[str]
) -> list[str]:
    """Return the monitors for which only the first update shows whether they are reported.

    Args:
        monitors: names of metrics.
        metrics: the metrics of the Trainer, by name.
        is_validated: whether `fit` got validation data.
        known: the names in earlier rows.
    """
    names = ["loss", *metrics]
    certain = {*names, *_ALWAYS, *known, *(f"val_{name}" for name in names if is_validated)}
    return [name for name in dict.fromkeys(monitors) if name not in certain]


def names_of(trained: Sequence[str], *, is_validated: bool) -> list[str]:
    """Return the names that a row can have if training reports the names `trained`."""
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
