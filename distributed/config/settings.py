"""DistributedConfig: every setting of a run, checked. Loads no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from distributed.config.fields import FrozenDict, Rule, Written, check, check_options, in_code, rules, setting
from distributed.config.peers import answer_for, with_answer
from distributed.config.registry import REGISTRY, TRANSPORTS, backend_row, default_backend, option_class
from distributed.errors import ConfigError, nearest

RESOURCES, TRAINING, OPTIMIZATION = "Resources", "Training", "Optimization"
COMMUNICATION, CHECKPOINTS, MONITORING, FAULTS = "Communication", "Checkpoints", "Monitoring", "Faults"


_LONGEST_S = 100_000_000  # three years; much larger timeouts overflow in Python and torch

# The groups of options: name -> help text. `ddp={"bucket_cap_mb": 50}` in code, `ddp:` in YAML.
GROUPS: Mapping[str, str] = {
    **{row.group: f"options of backend {row.name}" for row in REGISTRY.values()},
    "data": "options of the data pipeline",
}


def _with_groups(cls: type[Any]) -> type[Any]:
    """Add a field for each group of options to `cls`."""
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
    `given` and adds what it changes.

    Raises:
        ConfigError: a name is unknown or a value is wrong. The message names the fix.
    """

    # fmt: off
    backend: str | None = setting(None, f"the engine: {', '.join(REGISTRY)} (default: {default_backend(2)} for several processes, else {default_backend(1)})", str, group=RESOURCES)
    num_gpus: int | None = setting(None, "number of GPUs on all nodes together (default: the visible ones)", int, minimum=0, group=RESOURCES)
    num_nodes: int = setting(1, "machines", minimum=1, group=RESOURCES)
    gpus_per_node: int | None = setting(None, "GPUs per node, with one process per GPU", int, minimum=0, group=RESOURCES)
    nproc_per_node: int | None = setting(None, "processes per node", int, minimum=1, group=RESOURCES)
    device: str | None = setting(None, "cuda or cpu (default: cuda if available)", str, choices=("cpu", "cuda"), group=RESOURCES)
    node_rank: int = setting(0, "this machine's number, 0 to num_nodes - 1", minimum=0, group=RESOURCES)
    master_addr: str = setting("localhost", "host of node 0", group=RESOURCES)
    master_port: int | None = setting(None, "port of node 0 (default or 0: a free one)", int, minimum=0, maximum=65535, group=RESOURCES)
    address: str | None = setting(None, "an existing cluster to join, as HOST:PORT (default: start a new one)", str, group=RESOURCES)

    communication_backend: str | None = setting(None, "transport: nccl or gloo (default: nccl on GPUs, else gloo)", str, choices=TRANSPORTS, group=COMMUNICATION)
    timeout_s: float = setting(300.0, "seconds a collective may wait", above=0, maximum=_LONGEST_S, group=COMMUNICATION)
    start_timeout: float = setting(600.0, "seconds all workers may take to join", above=0, maximum=_LONGEST_S, group=COMMUNICATION)

    monitor_interval: float = setting(0.1, "seconds between two checks of the workers", above=0, maximum=_LONGEST_S, group=FAULTS)
    max_restarts: int = setting(3, "restarts after a worker was killed", minimum=0, group=FAULTS)
    restart_on_exception: bool = setting(False, "also restart after a Python exception of the script", group=FAULTS)
    nan_policy: str = setting("stop", "what a NaN or infinite loss or gradient does: stop, skip the update, or warn", choices=("stop", "skip", "warn"), group=FAULTS)

    seed: int = setting(0, "seed of sample order, augmentation, dropout and initial weights", minimum=0, maximum=2**64 - 1, group=TRAINING)
    deterministic: bool = setting(False, "refuse operations whose result can differ between two runs", group=TRAINING)
    shuffle: bool | None = setting(None, "shuffle the samples in each epoch (default: as the loader is set)", bool, group=TRAINING)
    epochs: int = setting(1, "passes over the training data", minimum=1, group=TRAINING)
    max_steps: int | None = setting(None, "largest number of optimizer updates", int, minimum=1, group=TRAINING)
    batch_size: int = setting(32, "samples per device and micro-batch", minimum=1, group=TRAINING)
    global_batch_size: int | None = setting(None, "samples per update (default: batch_size x gradient_accumulation_steps x processes)", int, minimum=1, group=TRAINING)
    gradient_accumulation_steps: int = setting(1, "micro-batches per update", minimum=1, group=TRAINING)
    dtype: str = setting("float32", "float32, or float64 for exact comparisons", choices=("float32", "float64"), group=TRAINING)
    early_stopping_patience: int | None = setting(None, "stop after this many epochs without a better monitor", int, minimum=1, group=TRAINING)
    monitor: str = setting("val_loss", "the metric that decides the best checkpoint and early stopping", group=TRAINING)
    monitor_mode: str = setting("min", "whether the min or max of the monitor is best", choices=("min", "max"), group=TRAINING)

    learning_rate: float = setting(1e-3, "learning rate of the default AdamW; it replaces the rate of an optimizer that you pass", above=0, group=OPTIMIZATION)
    lr_scaling: str = setting("none", "multiply the rate by global_batch_size / batch_size (linear), or its root (sqrt)", choices=("none", "linear", "sqrt"), group=OPTIMIZATION)
    warmup_steps: int = setting(0, "updates over which the rate rises to its value", minimum=0, group=OPTIMIZATION)
    warmup_start: float | None = setting(None, "fraction of the rate at the first update of a warm-up that rises exponentially (default: it rises linearly)", float, above=0, maximum=1, group=OPTIMIZATION)
    scheduler_interval: str = setting("step", "step the schedule per update (step) or per epoch", choices=("step", "epoch"), group=OPTIMIZATION)
    gradient_clipping: float | None = setting(None, "largest global norm of the gradient", float, above=0, group=OPTIMIZATION)
    mixed_precision: str | bool = setting("no", "no, fp16 or bf16 (true: fp16 on GPUs, bf16 on CPU)", bool, str, choices=("no", "fp16", "bf16", True, False), group=OPTIMIZATION)
    scaler_init_scale: float = setting(2.0**16, "first loss scale of fp16", above=0, maximum=1e38, group=OPTIMIZATION)
    scaler_growth_interval: int = setting(2000, "updates without overflow before the loss scale doubles", minimum=1, group=OPTIMIZATION)
    activation_checkpointing: bool = setting(False, "recompute activations in the backward pass to save memory", group=OPTIMIZATION)
    compile: bool = setting(False, "torch.compile the model (slow first step)", group=OPTIMIZATION)

    checkpoint_dir: str | None = setting(None, "directory of the checkpoints (default: RUN/checkpoints)", str, group=CHECKPOINTS)
    resume_from_checkpoint: str | bool = setting(False, "a path, or true for the newest verified checkpoint of the run directory", bool, str, group=CHECKPOINTS)
    checkpoint_at_start: bool = setting(False, "also save a checkpoint before the first update", group=CHECKPOINTS)
    checkpoint_frequency: int | None = setting(1, "epochs between checkpoints (null: none by epoch)", int, minimum=1, optional=True, group=CHECKPOINTS)
    checkpoint_every_n_steps: int | None = setting(None, "updates between checkpoints", int, minimum=1, group=CHECKPOINTS)
    checkpoint_every_s: float | None = setting(None, "seconds between checkpoints", float, above=0, maximum=_LONGEST_S, group=CHECKPOINTS)
    keep_latest_k: int = setting(3, "number of newest checkpoints to keep", minimum=1, group=CHECKPOINTS)
    keep_best: bool = setting(True, "also keep the checkpoint with the best monitor", group=CHECKPOINTS)

    log_every_n_steps: int = setting(50, "updates between two log lines", minimum=1, group=MONITORING)
    verbose: bool = setting(True, "show progress", group=MONITORING)
    mlflow_tracking: bool = setting(False, "log to MLflow: MLFLOW_TRACKING_URI, else mlflow.db beside the run directory", group=MONITORING)
    mlflow_experiment: str | None = setting(None, "log to this experiment of MLflow (default: the script's name)", str, group=MONITORING)
    mlflow_checkpoint: bool = setting(True, "also store the last checkpoint as an artifact in MLflow", group=MONITORING)
    mlflow_register_model: str | None = setting(None, "register the trained model in MLflow under this name", str, group=MONITORING)
    tensorboard: bool = setting(False, "write event files for TensorBoard", group=MONITORING)
    tensorboard_dir: str | None = setting(None, "write them below this directory, in one directory per run (default: RUN/tensorboard)", str, group=MONITORING)
    tensorboard_histograms: bool = setting(False, "also write histograms of weights and gradients after each epoch", group=MONITORING)
    profile: bool = setting(False, "profile some updates into RUN/profile and show the costliest operators", group=MONITORING)
    profile_wait: int = setting(10, "updates before the profiler warms up", minimum=0, group=MONITORING)
    profile_warmup: int = setting(2, "updates in which the profiler warms up", minimum=1, group=MONITORING)
    profile_active: int = setting(5, "updates that the profiler records", minimum=1, group=MONITORING)
    # fmt: on

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Check and store `settings`. Some spellings of other tools (`bucket_size_mb=5`) are accepted.

        A call that passes every setting is a copy (`**config.to_dict()`). In a copy, a value that equals the default
        does not count as given.
        """
        if args:
            raise ConfigError("DistributedConfig takes settings by name only: DistributedConfig(batch_size=32, ...)")
        before = settings.pop(_GIVEN, ())  # what was given in the configuration that `dataclasses.replace` copies
        given, notices = canonical(settings)
        known = rules(type(self))
        for name, rule in known.items():
            object.__setattr__(self, name, check_setting(name, given.get(name, rule.default), rule))
        if len(given) == len(known):  # a copy: nobody writes all settings by hand
            given = {name: value for name, value in given.items() if name in before or self._is_changed(name)}
        object.__setattr__(self, "_given", frozenset(given))
        object.__setattr__(self, "_notices", tuple(notices))
        if self.node_rank >= self.num_nodes:
            raise ConfigError(
                f"node_rank={self.node_rank} is not below num_nodes={self.num_nodes}: number the nodes from 0"
            )

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
    def notices(self) -> tuple[str, ...]:
        """Messages about names that were accepted as aliases of settings."""
        notices: tuple[str, ...] = self._notices  # type: ignore[attr-defined]
        return notices

    def options(self, group: str) -> Any:
        """Return the checked options object of `group` ("ddp", "data", ...)."""
        return check_options(group_options(group), getattr(self, group), group)

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name as plain Python. `given` has only those that were given."""
        values = {name: getattr(self, name) for name in rules(type(self))}
        return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


_GIVEN = "_given"


class _Fields:
    """`__dataclass_fields__` of DistributedConfig, with one more entry on instances.

    `dataclasses.replace` passes on which settings were given through that entry. It is an InitVar, so
    `dataclasses.fields` and `asdict` leave it out.
    """

    def __init__(self, own: dict[str, dataclasses.Field[Any]]) -> None:
        self._own = own

        @dataclasses.dataclass
        class Carrier:
            _given: dataclasses.InitVar[Any] = None

        self._all = {**own, _GIVEN: Carrier.__dataclass_fields__[_GIVEN]}

    def __get__(self, instance: DistributedConfig | None, owner: type) -> dict[str, dataclasses.Field[Any]]:
        return self._own if instance is None else self._all


DistributedConfig.__dataclass_fields__ = _Fields(DistributedConfig.__dataclass_fields__)  # type: ignore[assignment]


def group_options(group: str) -> type[Any]:
    """Return the class of the options of `group`. It is imported on first use."""
    if group != "data":
        return option_class(group)
    from distributed.config.data import DataOptions

    return DataOptions


def option_names() -> list[str]:
    """Return every option of every group as GROUP.OPTION."""
    return [f"{group}.{option}" for group in GROUPS for option in group_options(group).__dataclass_fields__]


def check_setting(name: str, value: Any, rule: Rule, written: Written = in_code) -> Any:
    """Return `value` converted to the type of the field `name`.

    Args:
        name: the name of the setting.
        value: the value to check.
        rule: the rule of the field.
        written: how the error writes the fix: as Python, YAML or a flag.

    Raises:
        ConfigError: the field, its group or this version does not accept the value.
    """
    checked = check(name, value, rule, written)
    if name in GROUPS:
        options = check_options(group_options(name), checked or {}, name, written)
        return FrozenDict({option: getattr(options, option) for option in checked or {}})
    if name == "backend" and checked is not None:
        backend_row(checked)
    return checked


def unknown_name(name: str, known: Iterable[str], written: Written = in_code) -> ConfigError:
    """Return the error for a name that is not a setting.

    It names our counterpart of another tool's setting, else the nearest name in `known`.
    """
    if answer := answer_for(name.partition(".")[0], written):
        return ConfigError(with_answer(f"{name} is not a setting", answer))
    return ConfigError(f"{name} is not a setting{nearest(name, known)}: see 'python -m distributed.cli train --help'")


def _owned(raw: str, name: str) -> ConfigError | None:
    """Return the error for an option of a backend that is written without its group, or None if no backend has it."""
    for group in GROUPS if answer_for(name) is None else ():
        if name in group_options(group).__dataclass_fields__:
            return ConfigError(
                f"{raw} is an option of {group}: write {group}={{{name!r}: ...}} in code, {group}.{name} by --set and in a file"
            )
    return None


# Accepted spellings of other tools: name -> our name. A dotted name is an option of a group.
ALIASES: Mapping[str, str] = {
    **{name: f"{row.group}.{option}" for row in REGISTRY.values() for name, option in row.aliases.items()},
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
    for raw, value in given.items():
        name = raw.replace("-", "_")
        if name == "world_size":
            out["nproc_per_node"], notice = nproc_of_world(value, given.get("num_nodes", 1))
            notices.append(notice)
            continue
        if name == "no_nccl":
            notices.append("no_nccl is read as communication_backend=gloo")
            if value:
                out["communication_backend"] = "gloo"
            continue
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
        elif name not in DistributedConfig.__dataclass_fields__:
            known = [*DistributedConfig.__dataclass_fields__, *option_names(), *flat]
            raise _owned(raw, name) or unknown_name(raw, known, written)
        else:
            out[name] = value
    return out, notices
