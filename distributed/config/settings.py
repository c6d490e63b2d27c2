"""DistributedConfig: every setting of a run, checked. Loads no framework."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.config.addresses import check_address, is_address
from distributed.config.fields import (
    FrozenDict,
    Rule,
    Written,
    check,
    check_options,
    factors,
    in_code,
    lower,
    pair,
    rules,
    setting,
    words,
)  # fmt: skip
from distributed.config.peers import answer_for, with_answer
from distributed.config.registry import REGISTRY, TRANSPORTS, backend_entry, default_backend, option_class
from distributed.errors import ConfigError, nearest

RESOURCES, TRAINING, VALIDATION, OPTIMIZATION = "Resources", "Training", "Validation", "Optimization"
COMMUNICATION, CHECKPOINTS, MONITORING, FAULTS = "Communication", "Checkpoints", "Monitoring", "Faults"


DEFAULT_PORT = 29500  # of node 0 with several nodes, as in torchrun
RANGES = {"min_nodes": "num_nodes", "min_nproc_per_node": "nproc_per_node"}  # the fewest -> the most
_LONGEST_S = 100_000_000  # three years; much larger timeouts overflow in Python and torch

# Optimizer or schedule that a setting can name -> the settings of its own that it takes. Every optimizer also takes learning_rate,
# weight_decay and layer_rates.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("betas",), "adam": ("betas",), "sgd": ("momentum",), "adafactor": (), "muon": ("betas", "momentum"),
}  # fmt: skip
_FALLING = ("scheduler_steps", "min_learning_rate")
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "constant": (), "linear": _FALLING, "cosine": _FALLING, "polynomial": (*_FALLING, "scheduler_power"),
    "wsd": (*_FALLING, "scheduler_decay_ratio"),
}  # fmt: skip

# The option groups: name -> help text. `ddp={"bucket_cap_mb": 50}` in code, `ddp:` in YAML.
GROUPS: Mapping[str, str] = {
    **{entry.group: f"options of backend {entry.name}" for entry in REGISTRY.values()},
    "data": "options of the data pipeline",
}


def _with_groups(cls: type[Any]) -> type[Any]:
    """Add a field for each option group to `cls`."""
    for group, text in GROUPS.items():
        cls.__annotations__[group] = "dict[str, Any]"
        setattr(cls, group, setting(None, text, dict))
    return cls


@dataclasses.dataclass(frozen=True)
@_with_groups
class DistributedConfig:
    """All settings of a run.

    Settings are passed by name; `python -m distributed.cli train --help` describes them. The object is frozen. `given`
    holds the settings that were passed explicitly: a file or a flag can fill in the others. `dataclasses.replace` keeps
    `given` and `notices`, and adds the settings that are passed to it.

    Args:
        settings: settings by name, and options of a backend as a dict under the name of their option group.

    Raises:
        ConfigError: a name is unknown or a value is wrong. The message names the fix.
    """

    # fmt: off
    backend: str | None = setting(None, f"the engine: {', '.join(REGISTRY)} (default: {default_backend(2)} for several processes, else {default_backend(1)})", str, section=RESOURCES)
    num_gpus: int | None = setting(None, "number of GPUs on all nodes together (default: the visible ones)", int, minimum=0, section=RESOURCES)
    num_nodes: int = setting(1, "machines", minimum=1, section=RESOURCES)
    gpus_per_node: int | None = setting(None, "GPUs per node, with one process per GPU", int, minimum=0, section=RESOURCES)
    nproc_per_node: int | None = setting(None, "processes per node", int, minimum=1, section=RESOURCES)
    min_nodes: int | None = setting(None, "fewest machines with which the run goes on; num_nodes=MIN:MAX sets both (default: num_nodes)", int, minimum=1, section=RESOURCES)
    min_nproc_per_node: int | None = setting(None, "fewest processes with which a node goes on; nproc_per_node=MIN:MAX sets both (default: nproc_per_node)", int, minimum=1, section=RESOURCES)
    device: str | None = setting(None, "cuda or cpu (default: cuda if available)", str, choices=("cpu", "cuda"), section=RESOURCES)
    node_rank: int = setting(0, "this machine's number, 0 to num_nodes - 1 (default: 0 on the machine of master_addr, else node 0 assigns one)", minimum=0, section=RESOURCES)
    master_addr: str = setting("localhost", "host of node 0", section=RESOURCES)
    master_port: int | None = setting(None, f"port of node 0 (default or 0: a free one, or {DEFAULT_PORT} with several nodes)", int, minimum=0, maximum=65535, section=RESOURCES)
    address: str | None = setting(None, "an existing cluster to join, as HOST:PORT (default: start a new one)", str, section=RESOURCES)
    wait: bool | float = setting(False, "seconds to wait for resources that the cluster at the address lacks (true: no limit; default: no wait)", bool, float, above=0, maximum=_LONGEST_S, section=RESOURCES)

    communication_backend: str | None = setting(None, "transport: nccl or gloo (default: nccl on GPUs, else gloo)", str, choices=TRANSPORTS, section=COMMUNICATION)
    timeout_s: float = setting(300.0, "seconds a collective may wait", above=0, maximum=_LONGEST_S, section=COMMUNICATION)
    start_timeout: float = setting(600.0, "seconds all workers may take to join", above=0, maximum=_LONGEST_S, section=COMMUNICATION)
    node_timeout: float = setting(120.0, "seconds to wait for a lost node, or its replacement", above=0, maximum=_LONGEST_S, section=COMMUNICATION)

    monitor_interval: float = setting(0.1, "seconds between two checks of the workers", above=0, maximum=_LONGEST_S, section=FAULTS)
    max_restarts: int = setting(3, "restarts after a worker was killed", minimum=0, section=FAULTS)
    hang_timeout: float | None = setting(60.0, "seconds without progress of a rank in an update after which the run restarts (0: no limit)", float, minimum=0, maximum=_LONGEST_S, optional=True, section=FAULTS)
    hang_timeout_slow: float | None = setting(None, "the same at the start of a fit, in a save, a validation or similar work (0: no limit; default: 10 times hang_timeout)", float, minimum=0, maximum=_LONGEST_S, section=FAULTS)
    elastic_interval_s: float = setting(300.0, "if the number of processes may change: seconds until lost processes are replaced, and the longest wait until a new node takes part", above=0, maximum=_LONGEST_S, section=FAULTS)
    restart_on_exception: bool = setting(False, "also restart after a Python exception of the script", section=FAULTS)
    max_failed_saves: int = setting(3, "number of failed saves in a row that ends the run", minimum=1, section=FAULTS)
    auto_micro_batch: bool = setting(False, "if a rank runs out of memory in an update, restart with half the micro-batch and twice the accumulation", section=FAULTS)
    nan_policy: str = setting("stop", "what to do at a NaN or infinite loss or gradient: stop, skip the update, or warn", choices=("stop", "skip", "warn"), section=FAULTS)

    seed: int = setting(0, "seed of sample order, augmentation, dropout and initial weights", minimum=0, maximum=2**64 - 1, section=TRAINING)
    deterministic: bool = setting(False, "refuse operations whose result can differ between two runs", section=TRAINING)
    shuffle: bool | None = setting(None, "shuffle the samples in each epoch (default: as the loader is set)", bool, section=TRAINING)
    epochs: int = setting(1, "passes over the training data", minimum=1, section=TRAINING)
    max_steps: int | None = setting(None, "largest number of optimizer updates", int, minimum=1, section=TRAINING)
    batch_size: int = setting(32, "samples per device and micro-batch", minimum=1, section=TRAINING)
    global_batch_size: int | None = setting(None, "samples per update (default: batch_size x gradient_accumulation_steps x processes)", int, minimum=1, section=TRAINING)
    gradient_accumulation_steps: int = setting(1, "micro-batches per update", minimum=1, section=TRAINING)
    init_from: str | None = setting(None, "start from the weights of a run, a checkpoint or a .safetensors file, with a new optimizer and at step 0", str, section=TRAINING)
    dtype: str = setting("float32", "float32, or float64 for exact comparisons", choices=("float32", "float64"), section=TRAINING)

    validate_every_n_steps: int | None = setting(None, "updates between two validations (default: validate after each epoch)", int, minimum=1, section=VALIDATION)
    validate_every_s: float | None = setting(None, "seconds between two validations (default: validate after each epoch)", float, above=0, maximum=_LONGEST_S, section=VALIDATION)
    validate_at_start: bool = setting(False, "also validate before the first update", section=VALIDATION)
    max_validation_batches: int | None = setting(None, "number of batches of each validation set that a validation reads (default: all)", int, minimum=1, section=VALIDATION)
    early_stopping_patience: int | None = setting(None, "stop after this many validations in a row without a better monitor (epochs, if the monitor is a metric of training)", int, minimum=1, section=VALIDATION)
    monitor: str = setting("val_loss", "the metric that decides the best checkpoint and early stopping", section=VALIDATION)
    monitor_mode: str = setting("min", "whether the min or max of the monitor is best", choices=("min", "max"), section=VALIDATION)

    optimizer: str | None = setting(None, "adamw, adam, sgd, adafactor or muon (default: AdamW with torch's defaults, or the optimizer that the script passes)", str, choices=tuple(OPTIMIZERS), section=OPTIMIZATION, convert=lower)
    learning_rate: float = setting(1e-3, "learning rate of the default AdamW or of the setting optimizer; if given, it replaces the rate of an optimizer that you pass", above=0, section=OPTIMIZATION)
    weight_decay: float | None = setting(None, "decay of weights, not of biases and norms (default: 0.01 with adamw and muon, else 0)", float, minimum=0, section=OPTIMIZATION)
    betas: tuple[float, float] | None = setting(None, "coefficients of Adam's averages of the gradient and of its square, as B1,B2 (default: 0.9,0.999)", tuple, section=OPTIMIZATION, convert=pair)
    momentum: float | None = setting(None, "momentum of sgd and muon (default: 0 with sgd, 0.95 with muon)", float, minimum=0, maximum=1, section=OPTIMIZATION)
    layer_rates: dict[str, float] | None = setting(None, "factors of the learning rate by the start of a parameter's name, as NAME=FACTOR,...", dict, section=OPTIMIZATION, convert=factors)
    scheduler: str | None = setting(None, "schedule of the rate: constant, linear, cosine, polynomial or wsd (default: constant, or the schedule that the script passes)", str, choices=tuple(SCHEDULES), section=OPTIMIZATION, convert=lower)
    scheduler_steps: int | None = setting(None, "updates until the schedule has reached its minimum (default: those of the run)", int, minimum=1, section=OPTIMIZATION)
    min_learning_rate: float = setting(0.0, "rate at the end of the schedule", minimum=0, section=OPTIMIZATION)
    scheduler_power: float = setting(2.0, "exponent of the polynomial schedule", above=0, section=OPTIMIZATION)
    scheduler_decay_ratio: float = setting(0.1, "fraction of the updates in which the wsd schedule lowers the rate", above=0, maximum=1, section=OPTIMIZATION)
    lr_scaling: str = setting("none", "multiply the rate by global_batch_size / batch_size (linear), or by its square root (sqrt)", choices=("none", "linear", "sqrt"), section=OPTIMIZATION)
    warmup_steps: int = setting(0, "updates over which the rate rises to its value", minimum=0, section=OPTIMIZATION)
    warmup_start: float | None = setting(None, "fraction of the rate at which an exponential warm-up begins (default: the warm-up is linear)", float, above=0, maximum=1, section=OPTIMIZATION)
    scheduler_interval: str = setting("step", "step the schedule per update (step) or per epoch", choices=("step", "epoch"), section=OPTIMIZATION)
    gradient_clipping: float | None = setting(None, "largest global norm of the gradient", float, above=0, section=OPTIMIZATION)
    mixed_precision: str | bool = setting("no", "no, fp16 or bf16 (true: fp16 on GPUs, bf16 on CPU)", bool, str, choices=("no", "fp16", "bf16", True, False), section=OPTIMIZATION)
    scaler_init_scale: float = setting(2.0**16, "first loss scale of fp16", above=0, maximum=1e38, section=OPTIMIZATION)
    scaler_growth_interval: int = setting(2000, "updates without overflow before the loss scale doubles", minimum=1, section=OPTIMIZATION)
    activation_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory", section=OPTIMIZATION)
    compile: bool = setting(False, "torch.compile the model (slow first step)", section=OPTIMIZATION)

    checkpoint_dir: str | None = setting(None, "directory of the checkpoints, or s3://BUCKET/PATH (default: RUN/checkpoints)", str, section=CHECKPOINTS)
    resume_from_checkpoint: str | bool = setting(False, "a path, or true for the newest verified checkpoint of the run directory", bool, str, section=CHECKPOINTS)
    checkpoint_at_start: bool = setting(False, "also save a checkpoint before the first update", section=CHECKPOINTS)
    checkpoint_frequency: int | None = setting(1, "epochs between checkpoints (null: none at the end of epochs)", int, minimum=1, optional=True, section=CHECKPOINTS)
    checkpoint_every_n_steps: int | None = setting(None, "updates between checkpoints", int, minimum=1, section=CHECKPOINTS)
    checkpoint_every_s: float | None = setting(None, "seconds between checkpoints", float, above=0, maximum=_LONGEST_S, section=CHECKPOINTS)
    checkpoint_trainable_only: bool = setting(False, "leave frozen parameters out of checkpoints; a resumed run takes them from the model", section=CHECKPOINTS)
    checkpoint_async: bool = setting(False, "copy the state and write the checkpoint in the background while training continues", section=CHECKPOINTS)
    snapshot_every_n_steps: int | None = setting(None, "updates between two snapshots in memory, from which killed workers start again (default: none)", int, minimum=1, section=CHECKPOINTS)
    keep_latest_k: int = setting(3, "number of newest checkpoints to keep", minimum=1, section=CHECKPOINTS)
    keep_best: bool = setting(True, "also keep the checkpoint with the best monitor", section=CHECKPOINTS)

    log_every_n_steps: int = setting(50, "updates between two log lines", minimum=1, section=MONITORING)
    verbose: bool = setting(True, "show progress", section=MONITORING)
    loggers: str | None = setting(None, "loggers to use: tensorboard, mlflow, wandb, csv, or one that a package registers", str, convert=words, section=MONITORING)
    mlflow_tracking: bool = setting(False, "log to MLflow: MLFLOW_TRACKING_URI, else mlflow.db beside the run directory", section=MONITORING)
    mlflow_experiment: str | None = setting(None, "log to this experiment of MLflow (default: the script's name)", str, section=MONITORING)
    mlflow_checkpoint: bool = setting(True, "also store the last checkpoint as an artifact in MLflow", section=MONITORING)
    mlflow_register_model: str | None = setting(None, "register the trained model in MLflow under this name", str, section=MONITORING)
    tensorboard: bool = setting(False, "write event files for TensorBoard", section=MONITORING)
    tensorboard_dir: str | None = setting(None, "write the event files below this directory, in one directory per run (default: RUN/tensorboard)", str, section=MONITORING)
    tensorboard_histograms: bool = setting(False, "also write histograms of weights and gradients after each epoch", section=MONITORING)
    profile: bool = setting(False, "profile some updates into RUN/profile and show the costliest operators", section=MONITORING)
    profile_wait: int = setting(10, "updates before the profiler warms up", minimum=0, section=MONITORING)
    profile_warmup: int = setting(2, "updates in which the profiler warms up", minimum=1, section=MONITORING)
    profile_active: int = setting(5, "updates that the profiler records", minimum=1, section=MONITORING)
    # fmt: on

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Check and store `settings`. Some spellings of other tools (`bucket_size_mb=5`) are accepted.

        A call that passes every setting is a copy (`**config.to_dict()`). In such a copy, a value that equals the default
        does not count as given, because it cannot be told from one that was never given.
        """
        if args:
            raise ConfigError("DistributedConfig takes settings by name only: DistributedConfig(batch_size=32, ...)")
        source, copied, passed = _split_copy(settings)
        values, notices = canonical({**without_outranked(copied, canonical(passed)[0]), **passed})
        known = rules(type(self))
        for name, rule in known.items():
            object.__setattr__(self, name, check_setting(name, values.get(name, rule.default), rule))
        given, of_arguments = set(values), frozenset[str]()
        if source is not None:
            given = {*without_outranked(source.given, canonical(passed)[0]), *canonical(passed)[0]}
            of_arguments = source.of_arguments & (given - canonical(passed)[0].keys())
            notices = [*source.notices, *notices]
        elif len(values) == len(known):  # a copy: nobody writes all settings by hand
            given = {name for name in values if self._is_changed(name)}
        object.__setattr__(self, "_given", frozenset(given))
        object.__setattr__(self, "_of_arguments", of_arguments)
        object.__setattr__(self, "_notices", tuple(dict.fromkeys(notices)))
        self._check_ranges()
        if self.node_rank >= self.num_nodes:
            raise ConfigError(
                f"node_rank={self.node_rank} is not below num_nodes={self.num_nodes}: number the nodes from 0"
            )

    @classmethod
    def from_training_arguments(cls, arguments: Any, *, num_training_steps: int | None = None) -> DistributedConfig:
        """Return the settings that correspond to a `TrainingArguments` object of transformers.

        Arguments that have no counterpart and do not change the results of training are listed in `notices`, which are shown at
        the start of a run. In a Trainer, the settings have the source "file": arguments of the Trainer and settings in code
        override them.

        Args:
            arguments: an object of `transformers.TrainingArguments` or a subclass.
            num_training_steps: the number of updates of the run, for arguments that are a fraction of it, such as a warm-up.

        Raises:
            ConfigError: arguments that are not at their defaults cannot be honoured. The message names all of them.
        """
        from distributed.config.training_arguments import settings_of

        settings, notices = settings_of(arguments, num_training_steps)
        config = cls(**settings)
        options: Any = config.options(backend_entry(config.backend).group) if config.backend is not None else None
        if hasattr(options, "settings_of_arguments"):  # the backend has read a config file of its own
            config = cls(**options.settings_of_arguments(settings))
        object.__setattr__(config, "_of_arguments", config._given)  # type: ignore[attr-defined]
        object.__setattr__(config, "_notices", (*config.notices, *notices))
        return config

    def _check_ranges(self) -> None:
        """Raise ConfigError if the fewest and the most nodes or processes contradict each other."""
        for least, most in RANGES.items():
            low, high = getattr(self, least), getattr(self, most)
            if low is not None and (high is None or low > high):
                have = f"{most} is not set" if high is None else f"{most}={high}"
                raise ConfigError(f"{least}={low}, but {have}: set {most}='{low}:MAX' with a MAX of {low} or more")
        if self.is_elastic and self.num_gpus:
            raise ConfigError(
                f"num_gpus={self.num_gpus} is a fixed number, but the number of processes may change: set gpus_per_node or nproc_per_node"
            )
        if (
            len([least for least, most in RANGES.items() if getattr(self, least) not in (None, getattr(self, most))])
            > 1
        ):
            raise ConfigError("num_nodes and nproc_per_node are both MIN:MAX: give one of them a fixed number")
        if self.num_nodes > 1 and self.min_nproc_per_node not in (None, self.nproc_per_node):
            raise ConfigError(
                f"nproc_per_node={self.min_nproc_per_node}:{self.nproc_per_node} does not work with {self.num_nodes} nodes:"
                f" set num_nodes='1:{self.num_nodes}' and a fixed nproc_per_node"
            )

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of processes may change during the run."""
        return any(getattr(self, least) not in (None, getattr(self, most)) for least, most in RANGES.items())

    @property
    def validates_by_steps(self) -> bool:
        """Return whether validations are due after a number of updates or seconds, and not after each epoch."""
        return self.validate_every_n_steps is not None or self.validate_every_s is not None

    @property
    def logger_names(self) -> tuple[str, ...]:
        """The names in `loggers`."""
        return tuple(self.loggers.split(",")) if self.loggers else ()

    def _is_changed(self, name: str) -> bool:
        value, default = getattr(self, name), rules(type(self))[name].default
        return bool(value) if name in GROUPS else value != default

    def warm_rate(self, full: float, step: int) -> float:
        """Return the learning rate during the warm-up.

        Args:
            full: the rate after the warm-up.
            step: the number of updates done before.
        """
        length = self.warmup_steps
        if step >= length:
            return full
        if self.warmup_start is None:
            return full * (step + 1) / length
        return full * float(self.warmup_start ** (1 - step / length))

    @property
    def given(self) -> dict[str, Any]:
        """Settings that were given explicitly, by name."""
        given: frozenset[str] = self._given  # type: ignore[attr-defined]
        return {name: getattr(self, name) for name in rules(type(self)) if name in given}

    @property
    def of_arguments(self) -> frozenset[str]:
        """The names of the settings that come from TrainingArguments."""
        names: frozenset[str] = self._of_arguments  # type: ignore[attr-defined]
        return names

    @property
    def notices(self) -> tuple[str, ...]:
        """Messages about names that were accepted as aliases of settings."""
        notices: tuple[str, ...] = self._notices  # type: ignore[attr-defined]
        return notices

    def options(self, group: str) -> Any:
        """Return the checked options object of the option group `group` ("ddp", "data", ...)."""
        return check_options(group_options(group), getattr(self, group), group)

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name as plain Python. `given` has only those that were given."""
        values = {name: getattr(self, name) for name in rules(type(self))}
        return {
            name: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @property
    def _copied(self) -> DistributedConfig:
        """This configuration itself, for `dataclasses.replace`."""
        return self


def without_outranked(weak: Mapping[str, Any], strong: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `weak` without the fewest nodes or processes where `strong` gives the number alone."""
    return {name: value for name, value in weak.items() if name in strong or RANGES.get(name) not in strong}


_COPIED = "_copied"


def _split_copy(settings: Mapping[str, Any]) -> tuple[DistributedConfig | None, dict[str, Any], dict[str, Any]]:
    """Return (configuration that `dataclasses.replace` copies or None, values copied from it, settings that were passed).

    `dataclasses.replace` first has what it is passed, then the fields that it copies in their order. `_copied` is the
    first of these, so it stands between the two.
    """
    names = list(settings)
    end = names.index(_COPIED) if _COPIED in settings else len(names)
    copied, passed = ({name: settings[name] for name in part} for part in (names[end + 1 :], names[:end]))
    return settings.get(_COPIED), copied, passed


class _Fields:
    """`__dataclass_fields__` of DistributedConfig, with one more entry on instances, which is the first.

    Through that entry `dataclasses.replace` passes on the configuration that it copies. It is an InitVar, so
    `dataclasses.fields` and `asdict` leave it out.
    """

    def __init__(self, own: dict[str, dataclasses.Field[Any]]) -> None:
        self._own = own

        @dataclasses.dataclass
        class Carrier:
            _copied: dataclasses.InitVar[Any] = None

        self._all = {_COPIED: Carrier.__dataclass_fields__[_COPIED], **own}

    def __get__(self, instance: DistributedConfig | None, owner: type) -> dict[str, dataclasses.Field[Any]]:
        return self._own if instance is None else self._all


DistributedConfig.__dataclass_fields__ = _Fields(DistributedConfig.__dataclass_fields__)  # type: ignore[assignment]


def group_options(group: str) -> type[Any]:
    """Return the class of the options in the option group `group`. It is imported on first use."""
    if group != "data":
        return option_class(group)
    from distributed.config.data import DataOptions

    return DataOptions


def option_names() -> list[str]:
    """Return every option of every option group as GROUP.OPTION."""
    return [f"{group}.{option}" for group in GROUPS for option in group_options(group).__dataclass_fields__]


def check_setting(name: str, value: Any, rule: Rule, written: Written = in_code) -> Any:
    """Return `value` converted to the type of the field `name`.

    Args:
        name: the name of the setting.
        value: the value to check.
        rule: the rule of the field.
        written: how the error writes the fix: as Python, YAML or a flag.

    Raises:
        ConfigError: the field, its option group or this version does not accept the value.
    """
    checked = check(name, value, rule, written)
    if name in GROUPS:
        options = check_options(group_options(name), checked or {}, name, written)
        return FrozenDict({option: getattr(options, option) for option in checked or {}})
    if name == "backend" and checked is not None:
        backend_entry(checked)
    if name == "checkpoint_dir" and is_address(checked):
        return check_address(name, checked)
    return checked


def unknown_name(name: str, known: Iterable[str], written: Written = in_code) -> ConfigError:
    """Return the error for a name that is not a setting.

    The error names our counterpart if `name` is a setting of another tool, otherwise the nearest name in `known`.
    """
    if answer := answer_for(name.partition(".")[0], written):
        return ConfigError(with_answer(f"{name} is not a setting", answer))
    return ConfigError(f"{name} is not a setting{nearest(name, known)}: see 'python -m distributed.cli train --help'")


def _owned(raw: str, name: str) -> ConfigError | None:
    """Return the error for an option of a backend that is written without its option group, or None if no backend has it."""
    for group in GROUPS if answer_for(name) is None else ():
        if name in group_options(group).__dataclass_fields__:
            return ConfigError(
                f"{raw} is an option of {group}: write {group}={{{name!r}: ...}} in code, {group}.{name} by --set and in a file"
            )
    return None


# Accepted spellings of other tools: name -> our name. A dotted name is an option of an option group.
ALIASES: Mapping[str, str] = {
    **{name: f"{entry.group}.{option}" for entry in REGISTRY.values() for name, option in entry.aliases.items()},
    "nnodes": "num_nodes",
    "gradient_clip_norm": "gradient_clipping",
    "save_interval": "checkpoint_every_n_steps",
    "use_gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing": "activation_checkpointing",
}
SWEEP_ALIASES: Mapping[str, str] = {"lr": "learning_rate"}  # accepted only in the dict of a sweep


def nproc_of_world(world_size: Any, num_nodes: Any) -> tuple[Any, str]:
    """Return (processes per node, notice) for a world of `world_size` processes on `num_nodes` nodes.

    Raises ConfigError if the world does not divide over the nodes.
    """
    if not isinstance(world_size, int) or not isinstance(num_nodes, int) or num_nodes <= 1:
        return world_size, "world_size is read as nproc_per_node"
    if world_size % num_nodes:
        raise ConfigError(
            f"world_size={world_size} is not divisible by num_nodes={num_nodes}: set a multiple of {num_nodes}"
        )
    per_node = world_size // num_nodes
    return per_node, f"world_size is read as nproc_per_node={per_node} on each of {num_nodes} nodes"


def _endpoint(name: str, value: Any) -> tuple[str, int]:
    """Return the host and the port of torchrun's HOST[:PORT]. Raises ConfigError for any other value."""
    found = re.fullmatch(r"(?P<host>[^\[\]:]+|\[[^\]]+\])(:(?P<port>\d+))?", value) if isinstance(value, str) else None
    if found is None:
        raise ConfigError(f"{name}={value!r} is not HOST:PORT: set the address of node 0 and its port")
    return found["host"].strip("[]"), int(found["port"] or DEFAULT_PORT)


def _range(name: str, value: Any) -> tuple[int, int] | None:
    """Return the fewest and the most of MIN:MAX, or of a pair. Return None for any other value. Raises ConfigError for a wrong order."""
    found = re.fullmatch(r"(\d+):(\d+)", value) if isinstance(value, str) else None
    pair = found.groups() if found else tuple(value) if isinstance(value, (list, tuple)) and len(value) == 2 else None
    if pair is None or not all(str(each).isdigit() for each in pair):
        return None
    low, high = map(int, pair)
    if not 1 <= low <= high:
        raise ConfigError(
            f"{name}={value!r} is not MIN:MAX with 1 <= MIN <= MAX: write {name}='{max(1, min(low, high))}:{max(1, low, high)}'"
        )
    return low, high


def _check_one_value(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a setting is given by its name and by an alias, with two values."""
    values = {raw.replace("-", "_"): value for raw, value in given.items()}
    for alias, name in [*ALIASES.items(), ("rdzv_endpoint", "master_addr"), ("rdzv_endpoint", "master_port")]:
        if alias in values and name in values and values[alias] != values[name]:
            raise ConfigError(f"{alias}={values[alias]} and {name}={values[name]} set the same: drop one of them")


def canonical(
    given: Mapping[str, Any], flat: Iterable[str] = (), written: Written = in_code
) -> tuple[dict[str, Any], list[str]]:
    """Return (settings, notices): aliases and dotted names are resolved, with one notice for each alias.

    Args:
        given: settings by name or alias.
        flat: other names that the caller accepts, for the error about a misspelt name.
        written: how the error writes the fix: as Python, YAML or a flag.

    Raises:
        ConfigError: a name is unknown.
    """
    out: dict[str, Any] = {}
    notices: list[str] = []
    _check_one_value(given)
    for raw, value in given.items():
        name = raw.replace("-", "_")
        if name == "world_size":
            num_nodes = given.get("num_nodes", given.get("nnodes", 1))
            out["nproc_per_node"], notice = nproc_of_world(value, num_nodes)
            notices.append(notice)
            continue
        if name == "no_nccl":
            notices.append("no_nccl is read as communication_backend=gloo")
            if value:
                out["communication_backend"] = "gloo"
            continue
        if name == "rdzv_endpoint":
            out["master_addr"], out["master_port"] = _endpoint(raw, value)
            notices.append(f"{raw} is read as master_addr={out['master_addr']} and master_port={out['master_port']}")
            continue
        if name == "num_workers" and _range(name, value) is not None:  # Ray's; a DataLoader's is one number
            notices.append("num_workers is read as nproc_per_node")
            name = "nproc_per_node"
        if name in ALIASES:
            notices.append(f"{raw} is read as {ALIASES[name]}")
            name = ALIASES[name]
        group, _, option = name.partition(".")
        if option:
            if group not in GROUPS:
                raise unknown_name(raw, option_names(), written)
            out.setdefault(group, {})[option] = value
        elif group in GROUPS:
            out.setdefault(group, {}).update(check(group, value, rules(DistributedConfig)[group], written) or {})
        elif name in RANGES.values() and (pair := _range(name, value)) is not None:
            least = next(least for least, most in RANGES.items() if most == name)
            out[least], out[name] = pair
        elif name not in DistributedConfig.__dataclass_fields__:
            known = [*DistributedConfig.__dataclass_fields__, *option_names(), *flat]
            raise _owned(raw, name) or unknown_name(raw, known, written)
        else:
            out[name] = value
    return out, notices
