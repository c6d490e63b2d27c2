"""The checked plan of a sweep: its trials, the resources of each trial, and how many trials run at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from distributed.config.cores import num_cores
from distributed.config.gpus import visible_gpus
from distributed.errors import ConfigError, ResourceError, nearest
from distributed.metrics.direction import is_larger_better
from distributed.training.trial import Trial
from distributed.tuning.space import Space
from distributed.tuning.sweep import TrialRecord

MODES = ("min", "max")
CHANCE = ("random", "grid")  # search algorithms that do not learn from results
# schedulers that pause trials in favour of others, so that all trials must exist at once
SHARING = ("hyperband", "pbt")
# Maps each scheduler to its options and their defaults. One unit of time is one report, which is an epoch.
SCHEDULERS: Mapping[str, Mapping[str, float]] = {
    "asha": {"grace_period": 1, "reduction_factor": 3, "max_t": 100_000},
    "hyperband": {"max_t": 81, "reduction_factor": 3},
    "pbt": {"perturbation_interval": 2, "quantile_fraction": 0.25, "resample_probability": 0.25},
}
Bundle = Mapping[str, float]


class TrialJob(Protocol):
    """Job that every trial runs. It is pickled and sent to the process of the trial."""

    needs_rows: bool  # whether each reported row must have the metric

    def run(self, trial: Trial, values: Mapping[str, Any], cpus: float) -> Any:
        """Train with `values` and return metrics, or None if all metrics were reported. An exception from it fails
        the trial."""


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """Checked plan of one sweep."""

    directory: Path  # absolute path of the sweep's directory
    job: TrialJob
    space: Space
    metric: str
    mode: str
    num_samples: int
    bundles: tuple[Bundle, ...]  # resources of each trial, reserved together; the first bundle holds the trial itself
    search: str = "random"
    gpus_if_any: float = 0.0  # GPUs of each trial if the cluster has any
    scheduler: str | None = None
    scheduler_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    seed: int = 0
    max_concurrent: int | None = None
    max_failures: int = 0
    address: str | None = None
    earlier: Sequence[TrialRecord] = ()
    scratch: Path | None = None  # directory for the files of the sweep's own cluster; the caller removes it

    @property
    def stop_file(self) -> Path:
        """Path of the stop file. While it exists, all trials save and leave."""
        return self.directory / ".stop"

    def num_live(self, there: Bundle, is_own: bool) -> int:
        """Return how many trials may exist at once in a cluster with the resources `there`.

        A search algorithm that learns from results proposes better values the later it is asked, so no more trials exist than
        can run. With one that does not learn, one more trial waits for the next free process if the resources limit how
        many trials run. With `is_own`, one also waits if `max_concurrent` trials just fit, because the cluster does not grow.

        Raises:
            ResourceError: no trial fits into the cluster.
        """
        needs = total(self.bundles)
        check_fits(needs, there, "this machine" if is_own else "the cluster")
        fit = max(1, min((int(there[name] / amount + 1e-9) for name, amount in needs.items() if amount), default=1))
        most = self.max_concurrent or math.inf
        if self.search in CHANCE and (fit < most or (is_own and fit == most)):
            return fit + 1
        return int(min(fit, most))


def check_scheduler(name: str | None, options: Mapping[str, Any]) -> tuple[str | None, dict[str, float]]:
    """Return the name of the scheduler and its options, completed with their defaults. Raises ConfigError."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"scheduler_options is a {type(options).__name__}: write {{'grace_period': 2}}")
    if name in (None, "none", "fifo"):
        if options:
            raise ConfigError(f"scheduler option {next(iter(options))!r} has no effect without a scheduler: drop it")
        return None, {}
    if name not in SCHEDULERS:
        raise ConfigError(
            f"scheduler={name!r} is not known{nearest(name, SCHEDULERS)}: choose one of {', '.join(SCHEDULERS)}, none"
        )
    defaults = SCHEDULERS[name]
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(
                f"{option} is not an option of scheduler {name}{nearest(option, defaults)}: it has {', '.join(defaults)}"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(
                f"{option}={value!r} of scheduler {name} is not a number above 0: set it to {defaults[option]:g}"
            )
    if options.get("reduction_factor", 2) <= 1:
        raise ConfigError(f"reduction_factor={options['reduction_factor']:g} keeps every trial: set more than 1")
    chosen = {**defaults, **options}
    _check_ends(name, chosen)
    return name, chosen


def _check_ends(name: str, options: Mapping[str, float]) -> None:
    """Raise ConfigError for an option of the scheduler that is too large."""
    for option, largest in (("quantile_fraction", 0.5), ("resample_probability", 1.0)):
        if options.get(option, 0.0) > largest:
            raise ConfigError(
                f"{option}={options[option]:g} of scheduler {name} is above {largest:g}: set it to that or less"
            )
    if options.get("grace_period", 0) > options.get("max_t", math.inf):
        raise ConfigError(
            f"grace_period={options['grace_period']:g} is above max_t={options['max_t']:g}: no trial could be stopped early, set"
            " it to less"
        )


def check_pairing(scheduler: str | None, search: str, max_concurrent: int | None = None) -> None:
    """Raise ConfigError if the scheduler does not fit the search algorithm.

    The search algorithm must not learn from values which the scheduler changes, and the scheduler must be able to keep
    `max_concurrent`.
    """
    if max_concurrent is not None and scheduler in SHARING:
        raise ConfigError(
            f"max_concurrent={max_concurrent} has no effect with scheduler={scheduler!r}, whose trials take turns: drop it, or"
            " choose scheduler='asha'"
        )
    if scheduler == "pbt" and search not in CHANCE:
        raise ConfigError(
            f"scheduler='pbt' changes the values that search={search!r} learns from: choose search='random'"
        )


def mode_of(metric: Any, mode: Any) -> str:
    """Return "min" or "max": `mode`, or if `mode` is None, the direction that the name of `metric` implies.

    Raises ConfigError if `metric` is not a name, if `mode` is neither "min" nor "max", or if the name implies no direction.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"metric={metric!r} is not a name: give the metric to optimise, such as metric='val_loss'")
    if mode is None:
        is_larger = is_larger_better(metric)
        if is_larger is None:
            raise ConfigError(f"it is unknown whether a small or a large {metric!r} is best: set the mode, min or max")
        return "max" if is_larger else "min"
    if mode not in MODES:
        raise ConfigError(f"mode={mode!r} is not known: choose min or max for {metric}")
    return str(mode)


def bundles_of(resources: Any, gpus: float = 0.0) -> tuple[Bundle, ...]:
    """Return the resources of a trial as bundles, as Ray Tune's placement groups have them.

    Args:
        resources: a dict (one bundle), a list of dicts (several bundles), or a placement group factory.
        gpus: GPUs that are added to the first bundle.
    """
    value = getattr(resources, "bundles", resources)
    if not isinstance(value, (Mapping, list, tuple, type(None))):
        raise ConfigError(
            f"resources_per_trial is a {type(value).__name__}: write {{'cpu': 1}}, or a list of such dicts"
        )
    listed = [{"CPU": 1.0}] if value is None else [value] if isinstance(value, Mapping) else list(value)
    bundles = tuple(_bundle(each) for each in listed)
    if not bundles or not any(total(bundles).values()):
        raise ConfigError(f"resources_per_trial={resources!r} is empty: write {{'cpu': 1}}")
    if gpus and total(bundles).get("GPU"):
        raise ConfigError("resources_per_trial and trials_per_gpu both set which part of a GPU a trial gets: drop one")
    return ({**bundles[0], "GPU": gpus}, *bundles[1:]) if gpus else bundles


def _bundle(each: Any) -> Bundle:
    if not isinstance(each, Mapping):
        raise ConfigError(
            f"resources_per_trial has a {type(each).__name__}: write {{'cpu': 1}}, or a list of such dicts"
        )
    names = {"cpu": "CPU", "gpu": "GPU"}
    for name, amount in each.items():
        if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount < 0 or not math.isfinite(amount):
            raise ConfigError(f"resources_per_trial: {name}={amount!r} is not an amount: write {{'{name}': 1}}")
    return {names.get(str(name).lower(), str(name)): float(amount) for name, amount in each.items()}


def total(bundles: Sequence[Bundle]) -> dict[str, float]:
    """Return the sum of all bundles."""
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def here() -> dict[str, float]:
    """Return the resources of this machine."""
    return {"CPU": float(num_cores()), "GPU": float(visible_gpus())}


def check_fits(needs: Bundle, there: Bundle, where: str) -> None:
    """Raise ResourceError if a trial needs more than `there` has. Such a trial would wait for ever."""
    for name, amount in needs.items():
        if amount > there.get(name, 0.0):
            raise ResourceError(
                f"a trial needs {amount:g} {name}, and {where} has {there.get(name, 0.0):g}: ask for less, with"
                " resources_per_trial or, for a script, with --cpus-per-trial or fewer processes (--nproc-per-node)"
            )
