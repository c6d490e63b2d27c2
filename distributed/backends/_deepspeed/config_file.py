"""Read and check a user's DeepSpeed config, and merge it with our settings. Imports no engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.errors import ConfigError, nearest

AUTO = "auto"
Path_ = tuple[str, ...]


def _whole(value: Any) -> int:
    if int(value) != float(value):
        raise ValueError(value)
    return int(value)


# DeepSpeed's entry -> (our setting, converter). A converter returns None if the value implies no setting.
_OURS: Mapping[Path_, tuple[str, Callable[[Any], Any]]] = {
    ("train_micro_batch_size_per_gpu",): ("batch_size", _whole),
    ("train_batch_size",): ("global_batch_size", _whole),
    ("gradient_accumulation_steps",): ("gradient_accumulation_steps", _whole),
    ("gradient_clipping",): ("gradient_clipping", lambda value: float(value) or None),
    ("steps_per_print",): ("log_every_n_steps", int),
    ("optimizer", "params", "lr"): ("learning_rate", float),
    ("fp16", "initial_scale_power"): ("scaler_init_scale", lambda value: 2.0 ** int(value)),
    ("fp16", "loss_scale_window"): ("scaler_growth_interval", int),
}
# Sections and entries that have an effect with this backend.
_ZERO = {
    "stage", "offload_optimizer", "offload_param", "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
    "ignore_unused_parameters", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size", "sub_group_size",
}  # fmt: skip
_KNOWN: Mapping[str, set[str] | None] = {
    **{path[0]: None for path in _OURS if len(path) == 1},
    "optimizer": {"type", "params"},
    "fp16": {"enabled", "initial_scale_power", "loss_scale_window", "loss_scale"},
    "bf16": {"enabled"},
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": None,
    "communication_data_type": None,
    "prescale_gradients": None,
    "wall_clock_breakdown": None,
}
OF_OPTIMIZER = ("optimizer", "betas", "weight_decay")  # our settings that a section `optimizer` replaces
_ADAM = {"lr", "betas", "eps", "weight_decay", "adam_w_mode", "torch_adam"}


def read(config: Any) -> Any:
    """Return `config` as a plain dict if it is a dict, the path of a JSON file or a `deepspeed.DeepSpeedConfig`. Return
    any other value unchanged."""
    config = getattr(config, "_param_dict", config)
    if isinstance(config, Mapping):
        return _plain(config)
    if not isinstance(config, (str, os.PathLike)):
        return config
    try:
        content = json.loads(Path(config).read_text())
    except OSError as error:
        raise ConfigError(
            f"deepspeed_config={str(config)!r} cannot be read ({error.strerror}): name a JSON file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"deepspeed_config={str(config)!r} is not JSON ({error}): correct it") from None
    if not isinstance(content, dict):
        raise ConfigError(f"deepspeed_config={str(config)!r} holds no JSON object: write {{...}}")
    return content


def _plain(value: Any) -> Any:
    """Return the value with plain dicts and lists, which JSON can represent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def at(config: Mapping[str, Any], path: Path_) -> Any:
    """Return the value at `path`. Return None if there is none, or if it is "auto", which selects our setting."""
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value == AUTO else value


def check(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for entries that would have no effect or are not supported."""
    for name, value in config.items():
        if name not in _KNOWN:
            raise ConfigError(f"deepspeed_config.{name} has no effect here{nearest(name, _KNOWN)}: drop it")
        known = _KNOWN[name]
        if known is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"deepspeed_config.{name}={value!r} is not a section: write {{...}}, or drop it")
        for inner in value:
            if inner not in known:
                raise ConfigError(f"deepspeed_config.{name}.{inner} has no effect here{nearest(inner, known)}: drop it")
    stage = at(config, ("zero_optimization", "stage"))
    if stage is not None and stage not in (0, 1, 2, 3):
        raise ConfigError(
            f"deepspeed_config.zero_optimization.stage={stage!r} is not a stage: set 0, 1, 2 or 3, or 'auto'"
        )
    for path in (("offload_optimizer",), ("offload_param",)):
        device = at(config, ("zero_optimization", *path, "device"))
        if device not in (None, "none", "cpu"):
            raise ConfigError(
                f"deepspeed_config.zero_optimization.{path[0]}.device={device!r} is not in this version: set 'cpu' or 'none'"
            )
    if at(config, ("fp16", "loss_scale")):
        raise ConfigError(
            f"deepspeed_config.fp16.loss_scale={at(config, ('fp16', 'loss_scale'))} fixes the loss scale, which is dynamic here: set 0"
        )
    if at(config, ("wall_clock_breakdown",)):
        raise ConfigError(
            "deepspeed_config.wall_clock_breakdown prints on the console: drop it, metrics.jsonl has the times"
        )
    _check_optimizer(config)


def _check_optimizer(config: Mapping[str, Any]) -> None:
    section = config.get("optimizer")
    if section is None:
        return
    if section.get("type") not in ("Adam", "AdamW"):
        raise ConfigError(
            f"deepspeed_config.optimizer.type={section.get('type')!r} is not created here: give Trainer"
            " optimizer=lambda params: ..., or set 'AdamW'"
        )
    if not isinstance(section.get("params", {}), Mapping):
        raise ConfigError(
            f"deepspeed_config.optimizer.params={section['params']!r} is not a section: write {{...}}, or drop it"
        )
    for name in section.get("params", {}):
        if name not in _ADAM:
            raise ConfigError(f"deepspeed_config.optimizer.params.{name} is not known{nearest(name, _ADAM)}: drop it")


def implied(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (location, our setting, its value) for each entry that corresponds to a setting of ours."""
    for path, (field, convert) in _OURS.items():
        value = at(config, path)
        if value is None:
            continue
        where = f"deepspeed_config.{'.'.join(path)}={value!r}"
        try:
            yield where, field, convert(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"{where} is not a number that fits: set one, or 'auto'") from None
    for kind in ("fp16", "bf16"):
        if at(config, (kind, "enabled")):
            yield f"deepspeed_config.{kind}.enabled=True", "mixed_precision", kind


def merged(own: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return both configs merged, section by section. Entries of `own` that are "auto" are dropped. `ours` wins where
    both have an entry."""
    out = {name: value for name, value in own.items() if value != AUTO}
    for name, value in ours.items():
        before = out.get(name)
        out[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return {name: merged(value, {}) if isinstance(value, Mapping) else value for name, value in out.items()}


def with_optimizer_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with entries "auto" in its section `optimizer` replaced by our settings of the same names."""
    section = config["optimizer"]
    ours = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    params = {
        name: ours.get(name, AUTO) if value == AUTO and name in OF_OPTIMIZER else value
        for name, value in section.get("params", {}).items()
    }
    return {**config, "optimizer": {**section, "params": params}}


def adam(config: Mapping[str, Any], learning_rate: float) -> tuple[str, dict[str, Any]] | None:
    """Return torch's name and arguments of the optimizer that the config asks for, or None if it asks for none."""
    section = config.get("optimizer")
    if section is None:
        return None
    params = {name: value for name, value in section.get("params", {}).items() if value != AUTO}
    # DeepSpeed's "Adam" is AdamW unless `adam_w_mode` is false, and its default weight decay is 0.
    is_decoupled = section["type"] == "AdamW" or params.pop("adam_w_mode", True)
    for name in ("adam_w_mode", "torch_adam"):
        params.pop(name, None)
    decays = "weight_decay" in section.get("params", {})
    return "AdamW" if is_decoupled else "Adam", {
        **({} if decays else {"weight_decay": 0.0}), **params, "lr": learning_rate,
    }  # fmt: skip
