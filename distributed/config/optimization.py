"""The optimizer and the schedule that settings name: what their settings mean, and which contradict each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distributed.config.merging import MergedConfig
from distributed.config.settings import OPTIMIZERS, SCHEDULES
from distributed.errors import ConfigError, nearest
from distributed.state import Job

_OF_OPTIMIZER = ("weight_decay", "betas", "momentum", "layer_rates")
_OF_SCHEDULER = ("scheduler_steps", "min_learning_rate", "scheduler_power", "scheduler_decay_ratio")
_MATRIX = 2  # dimensions of a weight that decays; biases and norms have fewer
# The default of torch's AdamW, so that setting the name alone does not change the strength of the decay.
_DEFAULT_DECAY = {"adamw": 1e-2, "muon": 1e-2}


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that settings name, in the place of `Job.optimizer`. Each engine builds its own.

    Attributes:
        name: "adamw", "adam", "sgd", "adafactor" or "muon".
        learning_rate: the rate of a parameter to which no entry of `layer_rates` applies.
        weight_decay: the decay of weights. It never applies to biases and norms, which have fewer than two dimensions.
        betas: the two coefficients of Adam's running averages, or None for the default of the engine's library.
        momentum: the coefficient of momentum, or None for the default of the optimizer.
        layer_rates: start of a parameter's name -> factor of its learning rate. The longest start applies.
    """

    name: str
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    layer_rates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def factor(self, parameter: str) -> float:
        """Return the factor of the learning rate of the parameter with this name."""
        starts = [start for start in self.layer_rates if parameter == start or parameter.startswith(f"{start}.")]
        return self.layer_rates[max(starts, key=len)] if starts else 1.0

    def check_starts(self, names: Sequence[str]) -> None:
        """Raise ConfigError if an entry of `layer_rates` applies to none of the trainable parameters `names`."""
        starts = {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)}
        for start in self.layer_rates:
            if start not in starts:
                raise ConfigError(
                    f"layer_rates names {start!r}, but no trainable parameter begins with it{nearest(start, sorted(starts))}:"
                    f" name a part of the model, such as {sorted(starts)[0]!r}"
                )

    def decay_of(self, num_dimensions: int) -> float:
        """Return the decay of a parameter with this number of dimensions."""
        return self.weight_decay if num_dimensions >= _MATRIX else 0.0

    def decay_notice(self, dimensions: Sequence[int]) -> str | None:
        """Return a notice if some of the parameters with these numbers of dimensions do not decay."""
        count = sum(number >= _MATRIX for number in dimensions)
        if not self.weight_decay or count == len(dimensions):
            return None
        return f"weight_decay={self.weight_decay:g} on {count} of {len(dimensions)} parameters: not on biases and norms"


@dataclasses.dataclass(frozen=True)
class RateCurve:
    """A learning-rate schedule that settings name, in the place of `Job.scheduler`. Each engine steps it once per update.

    Attributes:
        kind: "constant", "linear", "cosine", "polynomial" or "wsd" (warm-up, stable, decay; Hu et al., arXiv 2404.06395).
        length: the number of updates after which the rate stays at its minimum, with those of the warm-up.
        warmup: the number of updates of the warm-up, which `DistributedConfig.warm_rate` computes. The curve is 1 there.
        minimum: the rate at the end, for the parameters with the highest rate. Other parameters keep their ratio to it.
        power: the exponent of "polynomial".
        decay_ratio: the fraction of `length` in which "wsd" lowers the rate.
    """

    kind: str
    length: int
    warmup: int = 0
    minimum: float = 0.0
    power: float = 2.0
    decay_ratio: float = 0.1
    is_length_set: bool = False  # whether `scheduler_steps` sets the length, which then replaces that of a checkpoint

    def of_length(self, length: int) -> RateCurve:
        """Return this curve with the length of a checkpoint, unless a setting gives the length."""
        return self if self.is_length_set else dataclasses.replace(self, length=length)

    def length_notice(self, state: Mapping[str, Any], planned: int) -> str | None:
        """Return a notice if the length of this run's settings, `planned`, is not that of the checkpoint with `state`."""
        stored = int(state["length"])
        if self.kind == "constant" or stored == planned:
            return None
        if self.is_length_set:
            return f"scheduler_steps={planned} replaces the checkpoint's {stored}"
        return f"the schedule keeps the checkpoint's length of {stored} updates: set scheduler_steps for another one"

    def factor(self, step: int, full: float) -> float:
        """Return the rate for the update after `step` updates, as a fraction of the full rate. `full` is the highest full rate."""
        begin = self.warmup
        if self.kind == "wsd":
            begin = max(begin, self.length - max(1, round(self.length * self.decay_ratio)))
        if self.kind == "constant" or step <= begin:
            return 1.0
        done = 1.0 if step >= self.length else (step - begin) / (self.length - begin)
        left = {
            "linear": 1 - done,
            "wsd": 1 - done,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "polynomial": math.pow(1 - done, self.power),
        }[self.kind]
        floor = min(1.0, self.minimum / full)
        return floor + (1 - floor) * left


def check_named(merged: MergedConfig, job: Job) -> None:
    """Raise ConfigError if settings of an optimizer or of a schedule contradict each other or the arguments of the Trainer."""
    if job.names:
        for each in _by_model(merged, job).values():
            check_named(*each)
        return
    config = merged.config
    _check_one(merged, "optimizer", job.optimizer or _compiled(job), _OF_OPTIMIZER, is_compiled=job.optimizer is None)
    _check_one(merged, "scheduler", job.scheduler, _OF_SCHEDULER)
    kind = config.scheduler if _uses_scheduler(merged, job) else None
    _check_taken(merged, "optimizer", _optimizer_name(merged, job), OPTIMIZERS)
    _check_taken(merged, "scheduler", kind, SCHEDULES)
    if kind is not None and config.scheduler_interval == "epoch":
        raise ConfigError(
            f"scheduler_interval='epoch' does not work with scheduler={kind!r}, which counts updates: drop it"
        )
    is_named = job.optimizer is None and _compiled(job) is None and config.lr_scaling == "none"
    if kind is not None and is_named and config.min_learning_rate > config.learning_rate:
        raise ConfigError(
            f"min_learning_rate={config.min_learning_rate:g} is above learning_rate={config.learning_rate:g}: lower it"
        )
    if kind is not None and config.scheduler_steps is not None and config.scheduler_steps <= config.warmup_steps:
        raise ConfigError(
            f"scheduler_steps={config.scheduler_steps} leaves no update after warmup_steps={config.warmup_steps}: raise it"
        )


def _check_taken(merged: MergedConfig, what: str, name: str | None, takes: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ConfigError if a setting was given that the optimizer or schedule `name` does not take, but another one does."""
    for given in _given_for_run(merged, tuple(dict.fromkeys(each for names in takes.values() for each in names))):
        if name is not None and given not in takes[name] and not merged.is_overruled(given, what):
            others = [other for other, names in takes.items() if given in names]
            raise ConfigError(f"{given} has no effect with {what}={name!r}: drop it, or choose {' or '.join(others)}")


def _compiled(job: Job) -> Any:
    """Return the optimizer with which a Keras model was compiled, or None."""
    return getattr(job.model, "optimizer", None) if getattr(job.model, "compiled", False) is True else None


def _check_one(
    merged: MergedConfig, what: str, given_object: Any, refining: tuple[str, ...], *, is_compiled: bool = False
) -> None:
    """Check the setting `what` and the settings that refine it against an object that the script passes.

    With `is_compiled`, the object is the optimizer of a compiled Keras model, and a name in code replaces it.
    """
    sources = {name: merged.source(name) for name in _given(merged, (what, *refining))}
    if given_object is None:
        alone = [name for name, source in sources.items() if source in ("code", "flag")]
        if what == "scheduler" and what not in sources and (name := next(iter(alone), None)) is not None:
            raise ConfigError(f"{name} has no effect without a schedule: set scheduler='cosine' or another, or drop it")
        return
    if sources.get(what) == "code" and is_compiled:
        return
    if sources.get(what) == "code":
        raise ConfigError(
            f"{what}={getattr(merged.config, what)!r} and an object passed as {what} both set the {what}: drop one"
        )
    if what not in sources or sources[what] != "flag":
        for name in refining:
            if sources.get(name) in ("code", "flag"):
                raise ConfigError(
                    f"{name} has no effect on the {what} that the script passes: set it there, or set {what} to a name"
                    f" ({', '.join(OPTIMIZERS if what == 'optimizer' else SCHEDULES)})"
                )


def _given(merged: MergedConfig, names: tuple[str, ...]) -> list[str]:
    """Return the settings that were given. None is the default of most of them and counts as not given."""
    return [name for name in names if merged.is_given(name) and getattr(merged.config, name) is not None]


def _given_for_run(merged: MergedConfig, names: tuple[str, ...]) -> list[str]:
    """Return the settings that code or a flag gives. A file or a sweep may serve several scripts, so its settings do not count."""
    return [name for name in _given(merged, names) if merged.source(name) in ("code", "flag")]


def _replaces(merged: MergedConfig, what: str, given_object: Any, strong: tuple[str, ...] = ("flag",)) -> bool:
    """Return whether the setting `what` counts: its source is `strong`, or the script passes no object."""
    return getattr(merged.config, what) is not None and (given_object is None or merged.source(what) in strong)


def _optimizer_name(merged: MergedConfig, job: Job) -> str | None:
    if job.optimizer is None and _compiled(job) is not None:
        return merged.config.optimizer if _replaces(merged, "optimizer", True, ("code", "flag")) else None
    if _replaces(merged, "optimizer", job.optimizer):
        return merged.config.optimizer
    return "adamw" if job.optimizer is None and _given(merged, _OF_OPTIMIZER) else None


def _uses_scheduler(merged: MergedConfig, job: Job) -> bool:
    return _replaces(merged, "scheduler", job.scheduler)


def _warnings_of(merged: MergedConfig, num_updates: int | None) -> list[str]:
    warm = merged.config.warmup_steps
    if num_updates is None or warm <= num_updates:
        return []
    return [
        f"warning: warmup_steps={warm} is more than the {num_updates} updates of this run, so the rate never reaches its full value"
    ]


def named(merged: MergedConfig, job: Job, num_updates: int | None) -> tuple[Job, list[str]]:
    """Return `job` with the optimizer and the schedule that settings name, and notices about what they replace.

    Args:
        merged: the settings.
        job: the arguments of the Trainer.
        num_updates: the number of updates of the fit, or None if it is not known.

    Raises:
        ConfigError: the schedule needs the number of updates, or a flag replaces the optimizer to which the script's schedule is
            bound.
    """
    if job.names:
        return _several_named(merged, job, num_updates)
    config, notices = merged.config, _warnings_of(merged, num_updates)
    name = _optimizer_name(merged, job)
    optimizer, scheduler = job.optimizer, job.scheduler
    if name is not None:
        if optimizer is not None or _compiled(job) is not None:
            notices.append(f"optimizer={name} replaces the optimizer of the script")
        if optimizer is not None and hasattr(scheduler, "step") and not _uses_scheduler(merged, job):
            raise ConfigError(
                f"optimizer={name!r} replaces the optimizer to which the script's schedule belongs: set scheduler too, or"
                " pass the schedule as a function, scheduler=lambda optimizer: ..."
            )
        decay = config.weight_decay if config.weight_decay is not None else _DEFAULT_DECAY.get(name, 0.0)
        optimizer = NamedOptimizer(
            name, config.learning_rate, decay, config.betas, config.momentum, dict(config.layer_rates or {})
        )
    elif (optimizer is not None or _compiled(job) is not None) and (
        ignored := _given(merged, ("optimizer", *_OF_OPTIMIZER))
    ):
        notices.append(f"no effect here: {', '.join(ignored)} (the script passes an optimizer)")
    if _uses_scheduler(merged, job):
        if scheduler is not None:
            notices.append(f"scheduler={config.scheduler} replaces the schedule of the script")
        scheduler = _curve(merged, num_updates)
    elif scheduler is not None and (ignored := _given(merged, ("scheduler", *_OF_SCHEDULER))):
        notices.append(f"no effect here: {', '.join(ignored)} (the script passes a schedule)")
    return dataclasses.replace(job, optimizer=optimizer, scheduler=scheduler), notices


def _several_named(merged: MergedConfig, job: Job, num_updates: int | None) -> tuple[Job, list[str]]:
    """Return `named` of each of several models."""
    found = {name: named(*each, num_updates) for name, each in _by_model(merged, job).items()}
    optimizers = {name: each.optimizer for name, (each, _) in found.items()}
    schedulers = {name: each.scheduler for name, (each, _) in found.items()}
    notices = [f"{name}: {text}" for name, (_, texts) in found.items() for text in texts]
    return dataclasses.replace(job, optimizer=optimizers, scheduler=schedulers), notices


def _by_model(merged: MergedConfig, job: Job) -> dict[str, tuple[MergedConfig, Job]]:
    """Return the settings and the job of each of several models that are trained.

    If the optimizer or the schedule of one model takes a setting, it counts as not given for the models that do not take it.
    """
    found = {name: _of_model(merged, job, name) for name in job.optimizer}
    for setting in (*_OF_OPTIMIZER, *_OF_SCHEDULER):
        taking = [name for name, each in found.items() if setting in _taken(*each)]
        for name in found.keys() - taking if taking else ():
            settings, own = found[name]
            sources = {each: source for each, source in settings.sources.items() if each != setting}
            found[name] = dataclasses.replace(settings, sources=sources), own
    return found


def _taken(merged: MergedConfig, job: Job) -> tuple[str, ...]:
    """Return the settings that the optimizer and the schedule of a job take."""
    schedule = str(merged.config.scheduler) if _uses_scheduler(merged, job) else ""
    name = _optimizer_name(merged, job)
    return (*(("weight_decay", *OPTIMIZERS[name]) if name else ()), *SCHEDULES.get(schedule, ()))


def _of_model(merged: MergedConfig, job: Job, name: str) -> tuple[MergedConfig, Job]:
    """Return the settings and the job of one of several models. A name in its arguments is a setting in code."""
    own = job.of_model(name)
    given = {"optimizer": own.optimizer, "scheduler": own.scheduler}
    words: dict[str, Any] = {what: value for what, value in given.items() if isinstance(value, str)}
    without: dict[str, Any] = dict.fromkeys(words)
    own = dataclasses.replace(own, **without)
    chosen = {what: value for what, value in words.items() if merged.source(what) != "flag"}
    try:
        config = dataclasses.replace(merged.config, **chosen)
    except ConfigError as error:
        raise ConfigError(f"of the model {name!r}: {error}") from None
    return dataclasses.replace(merged, config=config, sources={**merged.sources, **dict.fromkeys(chosen, "code")}), own


def without_curve(job: Job) -> Job:
    """Return `job` without schedules that settings name, because their length is not known before a fit."""
    if job.names:
        kept = {name: each for name, each in job.scheduler.items() if not isinstance(each, RateCurve)}
        return dataclasses.replace(job, scheduler=kept)
    return dataclasses.replace(job, scheduler=None) if isinstance(job.scheduler, RateCurve) else job


def _curve(merged: MergedConfig, num_updates: int | None) -> RateCurve:
    config, kind = merged.config, str(merged.config.scheduler)
    length = config.scheduler_steps or num_updates
    if length is None and kind != "constant":
        raise ConfigError(
            f"scheduler={kind!r} needs the number of updates, and train_data has no length: set max_steps, or scheduler_steps"
        )
    return RateCurve(
        kind, length or 0, config.warmup_steps, config.min_learning_rate,
        config.scheduler_power, config.scheduler_decay_ratio, config.scheduler_steps is not None,
    )  # fmt: skip
