"""Settings that have a flag of their own, and how a setting is written on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.config.fields import in_words, rules
from distributed.config.settings import DistributedConfig

# Settings that have a flag of their own. The others are set by --set, in YAML or in code.
SETTINGS = (
    "backend", "nproc_per_node", "num_gpus", "num_nodes", "gpus_per_node", "device",
    "node_rank", "master_addr", "master_port", "address", "wait",
    "epochs", "max_steps", "batch_size", "global_batch_size", "gradient_accumulation_steps",
    "seed", "deterministic", "shuffle", "init_from", "dtype", "validate_every_n_steps", "max_validation_batches",
    "early_stopping_patience", "monitor", "monitor_mode",
    "optimizer", "learning_rate", "weight_decay", "scheduler", "min_learning_rate", "lr_scaling",
    "gradient_clipping", "mixed_precision", "scaler_init_scale",
    "scaler_growth_interval", "activation_checkpointing", "compile",
    "communication_backend",
    "checkpoint_dir", "resume_from_checkpoint", "checkpoint_frequency", "checkpoint_every_n_steps",
    "checkpoint_every_s", "keep_latest_k", "keep_best",
    "log_every_n_steps", "verbose", "loggers", "mlflow_tracking", "mlflow_experiment", "tensorboard", "tensorboard_dir",
    "profile",
    "max_restarts", "restart_on_exception", "nan_policy",
)  # fmt: skip
_RULES = rules(DistributedConfig)


def flag_of(name: str) -> str:
    """Return the flag's name `--some-setting` for the setting `name`, even if the command line has no such flag."""
    return f"--{name.replace('_', '-')}"


def as_flag(name: str, value: Any) -> str:
    """Return the setting as written on the command line, such as `--epochs 3`. With the value None, return only the
    flag."""
    if name not in SETTINGS:
        return f"--set {name}={'VALUE' if value is None else in_words(value)}"
    if value is None:
        return flag_of(name)
    if _RULES[name].kinds == (bool,):
        return flag_of(name) if value else f"--no-{flag_of(name)[2:]}"
    return f"{flag_of(name)} {in_words(value)}"


def flags_of(script: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the command-line arguments for `script` and `settings`."""
    words = ["--script", script]
    for name, value in settings.items():
        words += [flag_of(name), str(value)] if name in SETTINGS else ["--set", f"{name}={value}"]
    return words
