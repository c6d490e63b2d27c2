"""Find the losses and metrics that a script gives by Keras's names, such as "mae". Works on any engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.errors import ConfigError, nearest
from distributed.state import Job

_SHORTHANDS = ("accuracy", "acc")  # `compile` takes these names too, and chooses the metric by the targets


def check_names(job: Job) -> None:
    """Raise ConfigError for the name of a loss or a metric that Keras does not have."""
    import keras

    if isinstance(job.loss_fn, str):
        _check("loss_fn", job.loss_fn, keras.losses, ())
    for name, metric in job.metrics.items():
        if isinstance(metric, str):
            _check(f"metrics[{name!r}]", metric, keras.metrics, _SHORTHANDS)


def _check(argument: str, name: str, module: Any, others: tuple[str, ...]) -> None:
    if name in others:
        return
    try:
        module.get(name)
    except ValueError:
        kind = module.__name__.rpartition(".")[2]
        public = [each for each in dir(module) if not each.startswith("_") and _is_found(module, each)]
        raise ConfigError(
            f"{argument}={name!r} is not a name in keras.{kind}{nearest(name, [*public, *others])}: pass one of its names, or"
            " an object or function"
        ) from None


def _is_found(module: Any, name: str) -> bool:
    try:
        return module.get(name) is not None
    except (TypeError, ValueError):  # no loss or metric, or a class that needs arguments
        return False


def own_metrics(metrics: Mapping[str, Any], targets: Any, outputs: Any) -> dict[str, tuple[Any, Any, bool]]:
    """Return the metrics of the Trainer in the form of `compiled_metrics`.

    Metrics given by name are chosen as `compile` chooses them. Raises ConfigError if a metric is given by name and
    the model has several outputs.
    """
    import keras

    found: dict[str, tuple[Any, Any, bool]] = {}
    for name, metric in metrics.items():
        if isinstance(metric, str):
            if not keras.ops.is_tensor(outputs):
                raise ConfigError(
                    f"metrics[{name!r}]={metric!r} does not say which of the model's outputs it measures: pass"
                    " model.compile(metrics=...)"
                )
            metric = _metric(metric, targets, outputs)
        found[name] = (metric, None, False)
    return found


def _metric(name: str, targets: Any, outputs: Any) -> Any:
    """Workaround (Keras 3.15, no upstream issue known; may go when the choice is public): `get_metric` is private."""
    from keras.src.trainers.compile_utils import get_metric

    return get_metric(name, targets, outputs)
