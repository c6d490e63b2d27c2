"""Define what each setting needs to have an effect, and name the given settings that have no effect in this run.

One configuration may be used on a laptop, on a cluster and with several launchers. A setting that has no effect in one
of them is therefore not an error. Settings that contradict each other are refused elsewhere, where they are
checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distributed.backends import groups_in_use
from distributed.config.settings import GROUPS, OPTIMIZERS, SCHEDULES
from distributed.loggers.base import is_on_mlflow

if TYPE_CHECKING:
    from distributed.backends.base import Backend
    from distributed.launching.request import LaunchRequest


@dataclasses.dataclass(frozen=True)
class Situation:
    """Describe what decides whether a setting has an effect in a run: its backend, its launcher and its schedule."""

    backend: Backend[Any]  # has the settings, options, device and number of processes
    request: LaunchRequest | None  # the request to our launcher; None if another launcher or none started the workers
    is_worker: bool = True  # whether any launcher started this process
    has_schedule: bool | None = None  # whether there is a schedule that counts updates or epochs; None if not known yet


@dataclasses.dataclass(frozen=True)
class Need:
    """Describe what a setting needs to have an effect."""

    what: str  # what the setting needs, such as "several processes"
    lacks: Callable[[Situation, str], str]  # (situation, setting) -> why the need is not met, or ""


def of_launcher(what: str, value: Callable[[LaunchRequest, str], Any]) -> Need:
    """Return the need of a setting that our launcher reads.

    `value` returns the value of the setting in the request to the launcher. If this value differs from the setting, the
    launcher was started before the setting was known, so the setting has no effect.
    """

    def lacks(where: Situation, name: str) -> str:
        if where.request is None:
            return "another launcher started the processes" if where.is_worker else "fit trains in this process"
        group, _, option = name.rpartition(".")
        config = where.backend.config
        given = getattr(config.options(group) if group else config, option)
        if value(where.request, option) == given:
            return ""
        is_of_fit = where.request.payload is not None
        return "fit chooses it" if is_of_fit else "the launcher started without it: give it by flag or --config"

    return Need(what, lacks)


def _unless(reason: str, holds: Callable[[Situation], Any]) -> Callable[[Situation, str], str]:
    return lambda where, name: "" if holds(where) else reason


def _of_nodes(where: Situation) -> str:
    running = where.backend.plan.num_nodes
    if where.request is not None and where.request.is_elastic:
        return ""
    return "" if where.backend.config.num_nodes == running else f"another launcher started {running}"


def _has_tensorboard(where: Situation) -> bool:
    from distributed.loggers.tensorboard import is_on

    return is_on(where.backend.merged)


def _of_restarts(where: Situation) -> str:
    if where.request is not None:
        return ""
    return "another launcher started the processes" if where.is_worker else "fit trains in this process"


RESTARTED = Need("workers that `train` or `fit` starts", lambda where, name: _of_restarts(where))
OUR_LAUNCHER = of_launcher("workers that `train` or `fit` starts", getattr)
OF_CLUSTER = of_launcher("a cluster that is joined", lambda request, name: request.launcher_options.get(name))
SEVERAL_PROCESSES = Need("several processes", _unless("one process", lambda where: where.backend.plan.world_size > 1))
NODES = Need("the number of nodes that the launcher started", lambda where, name: _of_nodes(where))
SEVERAL_NODES = Need(
    "several nodes",
    _unless("one node", lambda where: where.backend.plan.num_nodes > 1 or where.backend.config.min_nodes is not None),
)
ELASTIC = Need(
    "num_nodes or nproc_per_node as MIN:MAX",
    _unless("the number of processes is fixed", lambda where: where.backend.config.is_elastic),
)
# For `timeout_s`: the launcher waits this long for its workers to stop, and the workers wait this long for each other.
WAITING = Need(
    "several processes, or workers that `train` or `fit` starts",
    lambda where, name: SEVERAL_PROCESSES.lacks(where, name) and OUR_LAUNCHER.lacks(where, name),
)
FP16 = Need(
    "mixed_precision=fp16",
    lambda where, name: "" if (kind := where.backend.mixed_precision) == "fp16" else f"mixed_precision is {kind}",
)
SCHEDULE = Need(
    "a schedule other than ReduceLROnPlateau",
    _unless("no schedule counts updates or epochs", lambda where: where.has_schedule is not False),
)


def _of_named(setting: str) -> Need:
    """Return the need of a setting that only some of the named optimizers or schedules take."""
    what, takes = ("optimizer", OPTIMIZERS) if setting in ("betas", "momentum") else ("scheduler", SCHEDULES)
    taking = [name for name, names in takes.items() if setting in names]
    default = "adamw" if what == "optimizer" else None
    return Need(
        f"{what}={' or '.join(taking)}",
        lambda where, _: (
            ""
            if (chosen := getattr(where.backend.config, what) or default) in taking
            else f"{what} is {chosen or 'not set'}"
        ),
    )


MLFLOW = Need("MLflow", _unless("MLflow is off", lambda where: is_on_mlflow(where.backend.merged)))
TENSORBOARD = Need("TensorBoard", _unless("TensorBoard is off", _has_tensorboard))
PROFILE = Need("profile", _unless("profile is off", lambda where: where.backend.config.profile))
HANGS = Need("hang_timeout", _unless("hang_timeout is 0", lambda where: where.backend.config.hang_timeout))
WARMUP = Need("warmup_steps", _unless("warmup_steps is 0", lambda where: where.backend.config.warmup_steps))


# Setting -> all of its needs, or () if it has an effect in every run. An option of a backend needs that backend, and what
# `Backend.needs` contains for the option. `Backend.needs` may also replace an entry of this table.
EFFECTS: Mapping[str, tuple[Need, ...]] = {
    "backend": (),
    "num_gpus": (),
    "num_nodes": (NODES,),
    "gpus_per_node": (),
    "nproc_per_node": (),
    "device": (),
    "min_nodes": (ELASTIC, OUR_LAUNCHER),
    "min_nproc_per_node": (ELASTIC, OUR_LAUNCHER),
    "elastic_interval_s": (ELASTIC, OUR_LAUNCHER),
    "node_rank": (SEVERAL_NODES, OUR_LAUNCHER),
    "master_addr": (SEVERAL_NODES, OUR_LAUNCHER),
    "master_port": (SEVERAL_NODES, OUR_LAUNCHER),
    "node_timeout": (SEVERAL_NODES, OUR_LAUNCHER),
    "address": (OF_CLUSTER,),
    "wait": (OF_CLUSTER,),
    "communication_backend": (SEVERAL_PROCESSES,),
    "timeout_s": (WAITING,),
    "start_timeout": (SEVERAL_PROCESSES,),
    "monitor_interval": (OUR_LAUNCHER,),
    "max_restarts": (OUR_LAUNCHER,),
    "restart_on_exception": (OUR_LAUNCHER,),
    "hang_timeout": (OUR_LAUNCHER,),
    "hang_timeout_slow": (OUR_LAUNCHER, HANGS),
    "nan_policy": (),
    "seed": (),
    "deterministic": (),
    "shuffle": (),
    "epochs": (),
    "max_steps": (),
    "batch_size": (),
    "global_batch_size": (),
    "gradient_accumulation_steps": (),
    "init_from": (),
    "dtype": (),
    "validate_every_n_steps": (),
    "validate_every_s": (),
    "validate_at_start": (),
    "max_validation_batches": (),
    "early_stopping_patience": (),
    "monitor": (),
    "monitor_mode": (),
    "optimizer": (),
    "learning_rate": (),
    "weight_decay": (),
    "betas": (_of_named("betas"),),
    "momentum": (_of_named("momentum"),),
    "layer_rates": (),
    "scheduler": (),
    "scheduler_steps": (_of_named("scheduler_steps"),),
    "min_learning_rate": (_of_named("min_learning_rate"),),
    "scheduler_power": (_of_named("scheduler_power"),),
    "scheduler_decay_ratio": (_of_named("scheduler_decay_ratio"),),
    "lr_scaling": (),
    "warmup_steps": (),
    "warmup_start": (WARMUP,),
    "scheduler_interval": (SCHEDULE,),
    "gradient_clipping": (),
    "mixed_precision": (),
    "scaler_init_scale": (FP16,),
    "scaler_growth_interval": (FP16,),
    "activation_checkpointing": (),
    "compile": (),
    "checkpoint_dir": (),
    "resume_from_checkpoint": (),
    "checkpoint_at_start": (),
    "checkpoint_frequency": (),
    "checkpoint_every_n_steps": (),
    "checkpoint_every_s": (),
    "checkpoint_trainable_only": (),
    "max_failed_saves": (),
    "auto_micro_batch": (RESTARTED,),
    "checkpoint_async": (),
    "snapshot_every_n_steps": (RESTARTED,),
    "keep_latest_k": (),
    "keep_best": (),
    "log_every_n_steps": (),
    "verbose": (),
    "loggers": (),
    "mlflow_tracking": (),
    "mlflow_experiment": (MLFLOW,),
    "mlflow_checkpoint": (MLFLOW,),
    "mlflow_register_model": (MLFLOW,),
    "tensorboard": (),
    "tensorboard_dir": (TENSORBOARD,),
    "tensorboard_histograms": (TENSORBOARD,),
    "profile": (),
    "profile_wait": (PROFILE,),
    "profile_warmup": (PROFILE,),
    "profile_active": (PROFILE,),
    "data.presharded": (),
    "data.shard_streams": (),
    "data.remove_unused_columns": (),
}


def without_effect(where: Situation) -> dict[str, str]:
    """Return setting -> why it has no effect in this run, for the settings that were given."""
    found = {name: _why(name, where) for name in _given(where)}
    return {name: why for name, why in found.items() if why}


def lines_of(found: Mapping[str, str], unless: str = "") -> list[str]:
    """Return a list with one line that names the settings of `without_effect`, grouped by reason, or [] if there are
    none."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.items():
        by_reason.setdefault(why, []).append(name)
    parts = [f"{', '.join(names)} ({why})" for why, names in by_reason.items()]
    return [f"no effect here{unless}: {'; '.join(parts)}"] if parts else []


def needs_of(backend: type[Backend[Any]], name: str) -> tuple[Need, ...]:
    """Return what `name`, a setting or an option of the backend, needs to have an effect under `backend`."""
    return backend.needs.get(name, EFFECTS.get(name, ()))


def _given(where: Situation) -> Iterator[str]:
    """Yield the name of each setting that was given. Each option of an option group counts as a setting of its own."""
    return (name for name in where.backend.merged.sources if name not in GROUPS)


def _why(name: str, where: Situation) -> str:
    group, _, _ = name.rpartition(".")
    used = ("", "data", *groups_in_use(where.backend.config, where.backend.plan.backend))
    if group not in used:
        return f"backend is {where.backend.plan.backend}"
    reasons = (need.lacks(where, name) for need in needs_of(type(where.backend), name))
    return next((reason for reason in reasons if reason), "")
