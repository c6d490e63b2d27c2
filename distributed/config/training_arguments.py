"""Translate the TrainingArguments of transformers into settings. Loads no framework."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from distributed.config.peers import answer_for, with_answer
from distributed.config.registry import REGISTRY, BackendEntry
from distributed.errors import ConfigError

UNLIMITED = 1 << 30  # a limit that is never reached
# Arguments with the same meaning under another name. None means: not set.
_RENAMED: Mapping[str, str] = {
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "seed": "seed",
    "full_determinism": "deterministic",
    "torch_compile": "compile",
    "eval_on_start": "validate_at_start",
    "remove_unused_columns": "data.remove_unused_columns",
    "ddp_backend": "communication_backend",
    "resume_from_checkpoint": "resume_from_checkpoint",
}
# Optimizer or schedule of transformers -> ours.
_OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "sgd": "sgd"}
_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
    "polynomial": "polynomial", "cosine_with_min_lr": "cosine",
}  # fmt: skip
# Schedule -> its arguments by our names, with the default of transformers.
_OF_SCHEDULES: Mapping[str, Mapping[str, tuple[str, Any]]] = {
    "polynomial": {"lr_end": ("min_learning_rate", 1e-7), "power": ("scheduler_power", 1.0)},
    "cosine_with_min_lr": {"min_lr": ("min_learning_rate", 0.0)},
}
# Arguments that change no number of training and have no counterpart. They are listed, with the reason.
_LISTED: Mapping[str, str] = {
    "per_device_eval_batch_size": "validation uses batch_size, or the batch size of a DataLoader",
    "eval_accumulation_steps": "metrics over all samples are kept on the host",
    "prediction_loss_only": "metrics are those of Trainer(metrics=...)",
    "logging_first_step": "the first log line is that of log_every_n_steps",
    "logging_nan_inf_filter": "nan_policy decides what a NaN does",
    "log_level": "the display shows progress, and RUN/logs has the output of each rank",
    "log_level_replica": "RUN/logs has the output of each rank",
    "log_on_each_node": "the main process logs",
    "include_num_input_tokens_seen": "it is not logged",
    "run_name": "--run-dir names the run",
    "project": "it is a setting of a tracker: set its variable in the environment",
    "save_on_each_node": "checkpoints are written once",
    "enable_jit_checkpoint": "SIGTERM always saves a checkpoint",
    "restore_callback_states_from_checkpoint": "the state of callbacks is always restored",
    "skip_memory_metrics": "memory is not measured",
    "do_train": "fit() trains",
    "do_eval": "evaluate() evaluates",
    "do_predict": "predict() predicts",
    "local_rank": "the launcher sets it",
    "predict_with_generate": "it is an argument of Trainer(predict_with_generate=True)",
    "generation_config": "it is an argument of Trainer(generation_config=...)",
    "generation_max_length": "pass Trainer(generation_config={'max_length': ...})",
    "generation_num_beams": "pass Trainer(generation_config={'num_beams': ...})",
}


def settings_of(arguments: Any, num_training_steps: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return (settings, notices) that say the same as a TrainingArguments object.

    Args:
        arguments: an object of `transformers.TrainingArguments` or a subclass.
        num_training_steps: the updates of the run, for arguments that are a fraction of them.

    Raises:
        ConfigError: an argument that is not at its default has no counterpart. All of them are named.
    """
    if not dataclasses.is_dataclass(arguments) or not hasattr(arguments, "per_device_train_batch_size"):
        raise ConfigError(f"a {type(arguments).__name__} is not TrainingArguments: pass those of transformers")
    found = _Translation(arguments, num_training_steps)
    for part in _PARTS:
        part(found)
    found.finish()
    return found.settings, found.notices


class _Translation:
    """The settings that were found so far, and the arguments that are not translated yet."""

    def __init__(self, arguments: Any, num_training_steps: int | None) -> None:
        self._arguments = arguments
        self._left = {each.name: _default(each) for each in dataclasses.fields(arguments)}
        self.settings: dict[str, Any] = {}
        self.notices: list[str] = []
        self._refused: list[str] = []
        self.total = arguments.max_steps if arguments.max_steps > 0 else num_training_steps

    def take(self, name: str) -> Any:
        """Return the value of an argument and mark it as translated. Return None if this version of transformers lacks it."""
        self._left.pop(name, None)
        value = getattr(self._arguments, name, None)
        return getattr(value, "value", value)  # of an enum

    def refuse(self, name: str, why: str) -> None:
        """Remember that the value of `name` cannot be honoured."""
        self._refused.append(f"{name}={getattr(self._arguments, name)!r} {why}")

    def steps(self, name: str) -> int | None:
        """Return a number of updates, which may be given as a fraction of those of the run."""
        value: float | None = self.take(name)
        if not value or value >= 1:
            return int(value) if value else None
        if self.total is None:
            self.refuse(name, "is a fraction of the updates of the run: pass num_training_steps=...")
            return None
        return math.ceil(self.total * value)

    def finish(self) -> None:
        """List or refuse the arguments that are left. Raises ConfigError if any is refused."""
        for name, default in self._left.items():
            value = getattr(self._arguments, name)
            if value == default or (value in ("", [], {}) and not default):
                continue
            if name in _LISTED:
                self.notices.append(f"{name} of TrainingArguments has no effect: {_LISTED[name]}")
            else:
                self.refuse(name, with_answer("is not translated", answer_for(name) or "drop it"))
        if self._refused:
            raise ConfigError("TrainingArguments cannot be honoured: " + "; ".join(self._refused))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _renamed(found: _Translation) -> None:
    for name, ours in _RENAMED.items():
        value = found.take(name)
        if value is not None:
            found.settings[ours] = value


def _length(found: _Translation) -> None:
    epochs, limit = found.take("num_train_epochs"), found.take("max_steps")
    if limit > 0:  # overrides the number of epochs
        found.settings |= {"max_steps": limit, "epochs": UNLIMITED}
    elif epochs != int(epochs):
        found.refuse("num_train_epochs", "is not a whole number: set max_steps")
    else:
        found.settings["epochs"] = int(epochs)
    data_seed = found.take("data_seed")
    if data_seed not in (None, found.settings["seed"]):
        found.refuse("data_seed", "differs from seed, and there is one seed: drop it")


def _update(found: _Translation) -> None:
    name = str(found.take("optim"))
    settings = found.settings
    betas = (found.take("adam_beta1"), found.take("adam_beta2"))
    if name not in _OPTIMIZERS:
        found.refuse(
            "optim",
            f"has no counterpart: use one of {', '.join(_OPTIMIZERS)}, or drop it and pass Trainer(optimizer=...)",
        )
    else:
        settings["optimizer"] = _OPTIMIZERS[name]
        if settings["optimizer"] == "adamw":
            settings["betas"] = betas
    clipping = found.take("max_grad_norm")
    if clipping:
        settings["gradient_clipping"] = clipping
    if found.take("bf16"):
        settings["mixed_precision"] = "bf16"
    if found.take("fp16"):
        settings["mixed_precision"] = "fp16"
    _checkpointing_of_activations(found)


def _checkpointing_of_activations(found: _Translation) -> None:
    if any([found.take("gradient_checkpointing"), found.take("activation_checkpointing")]):
        found.settings["activation_checkpointing"] = True
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if found.take(name) not in (None, {}, {"use_reentrant": False}):
            found.refuse(name, "has no counterpart: drop it")
    if found.take("torch_compile_backend") not in (None, "inductor"):
        found.refuse("torch_compile_backend", "is not inductor, which compile uses: drop it")


def _schedule(found: _Translation) -> None:
    name, given = str(found.take("lr_scheduler_type")), dict(found.take("lr_scheduler_kwargs") or {})
    warmup = found.steps("warmup_steps") or found.steps("warmup_ratio")
    if name not in _SCHEDULES:
        found.refuse(
            "lr_scheduler_type",
            f"has no counterpart: use one of {', '.join(_SCHEDULES)}, or drop it and pass Trainer(scheduler=...)",
        )
        return
    found.settings["scheduler"] = _SCHEDULES[name]
    if name == "constant" and warmup:
        found.notices.append("warmup_steps of TrainingArguments has no effect with lr_scheduler_type='constant'")
    elif warmup:
        found.settings["warmup_steps"] = warmup
    for argument, (ours, default) in _OF_SCHEDULES.get(name, {}).items():
        found.settings[ours] = given.pop(argument, default)
    if given:
        found.refuse(
            "lr_scheduler_kwargs",
            f"has {', '.join(given)}, which has no counterpart: drop it and pass Trainer(scheduler=...)",
        )


def _validation(found: _Translation) -> None:
    logging = str(found.take("logging_strategy"))
    every = found.steps("logging_steps")
    if logging == "steps":
        found.settings["log_every_n_steps"] = every or 1
    else:
        found.notices.append(f"logging_strategy={logging!r} of TrainingArguments has no effect: each epoch has a row")
    if str(found.take("eval_strategy")) == "steps":
        found.settings["validate_every_n_steps"] = found.steps("eval_steps") or every
    found.take("eval_steps")
    is_best = found.take("load_best_model_at_end")
    metric, is_greater = found.take("metric_for_best_model"), found.take("greater_is_better")
    if metric is not None:
        found.settings["monitor"] = f"val_{metric.removeprefix('eval_')}"
        found.settings["monitor_mode"] = (
            "max" if (is_greater if is_greater is not None else "loss" not in metric) else "min"
        )
    if is_best:
        found.settings["keep_best"] = True
        found.notices.append(
            "load_best_model_at_end of TrainingArguments keeps the best checkpoint, and the model ends with its last weights:"
            " distributed.load_weights(model, RUN) loads the best"
        )


def _checkpoints(found: _Translation) -> None:
    strategy, every = str(found.take("save_strategy")), found.steps("save_steps")
    if strategy == "best":
        found.refuse("save_strategy", "has no counterpart: use 'epoch' or 'steps'; the best checkpoint is kept besides")
    found.settings["checkpoint_frequency"] = 1 if strategy == "epoch" else None
    if strategy == "steps":
        found.settings["checkpoint_every_n_steps"] = every
    found.settings["keep_latest_k"] = found.take("save_total_limit") or UNLIMITED
    directory = found.take("output_dir")
    if directory not in (None, "", "trainer_output"):
        found.settings["checkpoint_dir"] = str(directory)


def _loggers(found: _Translation) -> None:
    given = found.take("report_to")
    names = [given] if isinstance(given, str) else list(given or ())
    ours = [name for name in names if name in ("tensorboard", "mlflow", "wandb")]
    if others := [name for name in names if name not in (*ours, "none")]:
        found.refuse(
            "report_to", f"has {', '.join(others)}: use tensorboard, mlflow or wandb, or pass Trainer(loggers=[...])"
        )
    if ours:
        found.settings["loggers"] = ",".join(ours)
    if found.take("disable_tqdm"):
        found.settings["verbose"] = False


def _processes(found: _Translation) -> None:
    is_cpu = found.take("use_cpu")
    if is_cpu:
        found.settings["device"] = "cpu"
    if not found.take("dataloader_pin_memory") and not is_cpu:
        found.notices.append("dataloader_pin_memory of TrainingArguments has no effect: it belongs to a DataLoader")
    if (wait := found.take("ddp_timeout")) not in (None, 1800):
        found.settings["timeout_s"] = float(wait)
    order = found.take("train_sampling_strategy")
    if order == "sequential":
        found.settings["shuffle"] = False
    elif order not in (None, "random"):
        found.refuse("train_sampling_strategy", "has no counterpart: pass a DataLoader with a batch_sampler")
    _accelerator(found)
    for entry in REGISTRY.values():
        _backend(found, entry)


def _accelerator(found: _Translation) -> None:
    """Refuse what differs from the defaults of Accelerate."""
    config = found.take("accelerator_config")
    values = vars(config) if config is not None and not isinstance(config, Mapping) else config or {}
    usual = {"even_batches": True, "use_seedable_sampler": True}
    if changed := [name for name, value in values.items() if value not in (None, False) and usual.get(name) != value]:
        found.refuse("accelerator_config", f"sets {', '.join(changed)}, which has no counterpart: drop it")


def _backend(found: _Translation, entry: BackendEntry) -> None:
    """Choose the backend of `entry`, with its options, if an argument asks for it."""
    for name, option in entry.training_options.items():
        if (value := found.take(name)) is not None:
            found.settings[f"{entry.group}.{option}"] = value
    known = entry.training_arguments
    values = {name: found.take(name) for name in dict.fromkeys(each.partition(".")[0] for each in known)}
    if not any(values[name] for name in known if "." not in name):
        return
    found.settings["backend"] = entry.name
    for name, value in values.items():
        options = {known[name]: value} if known.get(name) else {}
        for key, each in value.items() if isinstance(value, Mapping) and name not in known else ():
            if f"{name}.{key}" in known:
                options[known[f"{name}.{key}"]] = each
            elif each:
                found.refuse(
                    name,
                    f"sets {key}, which has no counterpart: use the option group {entry.group} of DistributedConfig",
                )
        for option, each in options.items():
            if each not in (None, 0) or isinstance(each, bool):
                found.settings[f"{entry.group}.{option}"] = ",".join(each) if isinstance(each, list) else each


_PARTS: tuple[Callable[[_Translation], None], ...] = (
    _renamed, _length, _update, _schedule, _validation, _checkpoints, _loggers, _processes,
)  # fmt: skip
