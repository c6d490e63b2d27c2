"""Settings of other trainers and launchers, each with our counterpart or the reason why there is none.

The names in this table are never accepted as settings. Using one is an error that names the fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from distributed.config.fields import Written, in_code
from distributed.config.registry import LATER, REGISTRY

# `{epochs}` or `{device=cpu}`: replaced by the setting as a flag, in code or in YAML.
_SETTING = re.compile(r"\{([a-z_.]+)(?:=(\w+))?\}")

_VALIDATION = "use {validate_every_n_steps} or {validate_every_s}; without them, validation runs after each epoch"
_LOADER = "because it belongs to the loader: use DataLoader(num_workers=..., prefetch_factor=..., ...)"
_OPTIMIZER = "because it belongs to the optimizer: use Trainer(optimizer=lambda params: torch.optim.AdamW(params, ...))"
_SCHEDULE = "use {scheduler} and {warmup_steps}, or Trainer(scheduler=lambda optimizer: ...) in code"
_LOSS = "because it is part of the loss: use Trainer(loss_fn=...) in code"
_OBJECT = "because it is an object: pass it to Trainer(...) in code"
_DATA = "because data goes to trainer.fit(train_data, val_data) in code"
_MODEL = "because it belongs to the model: change the model in the script"
_RUN_DIR = (
    "the flag --run-dir of 'distributed train' names the run directory; in code, {checkpoint_dir} sets the directory of the checkpoints,"
    " and {resume_from_checkpoint} the run or checkpoint to go on from"
)
_LOGS = "because the output of every rank is in RUN/logs; --run-dir names the run directory"
_ALWAYS = "because this is always done: drop it"
_RENDEZVOUS = "because the rendezvous has one form: use {master_addr} and {master_port}"
_ORDER = "because the Trainer gives each process its part of every global batch: drop it, or use {data.presharded}"
_LIMIT = "because the data sets the length of an epoch: pass a torch.utils.data.Subset to fit(); {max_steps} limits the updates"
_SWITCH = "because it is a switch of torch: set it at the top of the script"
_NO_TPU = "because TPUs are not supported"
_NO_HUB = "because nothing is uploaded: write the weights with trainer.save('model.safetensors')"
_METHOD = "because it is a method: use trainer.fit(), trainer.evaluate() or trainer.predict()"
_RESUME = "use {resume_from_checkpoint}, or the flag --resume"
_WEIGHTS = "use {init_from}, which loads the weights alone"
_PRECISION = "use {mixed_precision=bf16} or {mixed_precision=fp16}; {dtype=float64} computes in double precision"
_TRACKERS = "use {loggers}, {tensorboard} or {mlflow_tracking}; RUN/metrics.jsonl is always written"
_PROCESSES = "use {nproc_per_node}, or {num_gpus} for GPUs over all nodes"
_LATER = "that backend is not in this version, drop its options"


def _same(answer: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, answer)


# Lightning's Trainer
_LIGHTNING = {
    "accelerator": "use {device}",
    "strategy": "use {backend}",
    "devices": _PROCESSES,
    "gpus": _PROCESSES,
    "precision": _PRECISION,
    "max_epochs": "use {epochs}",
    "max_time": "because a run has no time limit of its own: send SIGTERM, which ends it after a checkpoint; {max_steps} limits the updates",
    "fast_dev_run": "use {max_steps=1}",
    "accumulate_grad_batches": "use {gradient_accumulation_steps}",
    "gradient_clip_val": "use {gradient_clipping}",
    "gradient_clip_algorithm": "because {gradient_clipping} is always by the global norm",
    "default_root_dir": _RUN_DIR,
    "ckpt_path": _RESUME,
    "profiler": "use {profile}",
    "detect_anomaly": "because it is a switch of torch; {nan_policy} sets what happens at a NaN",
    "enable_checkpointing": "use {checkpoint_frequency}; a run always ends with a checkpoint",
    "sync_batchnorm": "because it changes the model: use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    "auto_lr_find": "because it is a method: use trainer.find_learning_rate()",
    "auto_scale_batch_size": "because it is a method: use trainer.find_batch_size()",
    "inference_mode": _ALWAYS,
    "plugins": "because {backend} selects everything that an engine needs",
    "reload_dataloaders_every_n_epochs": "because data is passed once: call trainer.fit() again with other data",
    **_same(_TRACKERS, "logger", "log_with", "report_to", "wandb", "wandb_project"),
    **_same("because a run ends after {epochs} or {max_steps} or by {early_stopping_patience}", "min_epochs", "min_steps"),
    "num_sanity_val_steps": "use {validate_at_start} and {max_validation_batches}",
    "limit_val_batches": "use {max_validation_batches}",
    **_same(_LIMIT, "limit_train_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    **_same(_VALIDATION, "val_check_interval", "check_val_every_n_epoch"),
    **_same("use {verbose=false}", "enable_progress_bar", "enable_model_summary", "barebones"),
    **_same(_SWITCH, "benchmark", "cudnn_benchmark"),
    **_same(_ORDER, "use_distributed_sampler", "replace_sampler_ddp"),
    "tpu_cores": _NO_TPU,
}  # fmt: skip

# Hugging Face's TrainingArguments
_HUGGING_FACE = {
    "overwrite_output_dir": "because a run directory is never overwritten: name another with --run-dir, or add --resume",
    "per_device_eval_batch_size": "because it belongs to the loader: pass a DataLoader with that batch_size as val_data",
    "num_train_epochs": "use {epochs}",
    "max_train_steps": "use {max_steps}",
    "max_grad_norm": "use {gradient_clipping}",
    "warmup_ratio": "use {warmup_steps}, a number of updates",
    "logging_dir": "use {tensorboard_dir}",
    "save_strategy": "use {checkpoint_frequency} or {checkpoint_every_n_steps}",
    "save_total_limit": "use {keep_latest_k}",
    "metric_for_best_model": "use {monitor}",
    "greater_is_better": "use {monitor_mode}",
    "load_best_model_at_end": "because the model keeps its last weights: use {keep_best}, which keeps the best checkpoint",
    "save_only_model": "because a checkpoint always holds the whole training state: write the weights alone with trainer.save('model.safetensors')",
    "bf16": "use {mixed_precision=bf16}",
    "fp16": "use {mixed_precision=fp16}",
    "tf32": "because it is a switch of torch: use torch.set_float32_matmul_precision('high')",
    "data_seed": "use {seed}",
    "full_determinism": "use {deterministic}",
    "auto_find_batch_size": "because it is a method: use trainer.find_batch_size()",
    "disable_tqdm": "use {verbose=false}",
    "ignore_data_skip": "because a resumed run always continues at the next sample",
    "label_smoothing_factor": _LOSS,
    "log_level": "because it belongs to Python's logging: use logging.getLogger('distributed').setLevel(...)",
    "local_rank": "because the launcher sets it in LOCAL_RANK",
    "gradient_checkpointing_kwargs": "use {activation_checkpointing}",
    "early_stopping_threshold": "because any better value of {monitor} counts as an improvement",
    **_same("use {batch_size}", "per_device_train_batch_size", "per_gpu_train_batch_size", "device_train_microbatch_size"),
    **_same("use {global_batch_size}", "train_batch_size", "total_batch_size", "split_batches"),
    **_same(_RUN_DIR, "output_dir", "project_dir", "run_name", "save_folder", "storage_path", "run_dir"),
    **_same("use {log_every_n_steps}", "logging_steps", "logging_strategy", "log_interval", "log_every", "logging_first_step"),
    **_same("use {checkpoint_every_n_steps}", "save_steps", "checkpointing_steps", "save_every", "save_freq"),
    "eval_on_start": "use {validate_at_start}",
    **_same(_VALIDATION, "eval_steps", "eval_strategy", "evaluation_strategy", "eval_interval", "eval_every", "eval_delay"),
    **_same(_METHOD, "do_train", "do_eval", "do_predict"),
    "optim": "use {optimizer}",
    "adafactor": "use {optimizer=adafactor}",
    **_same("use {betas}", "adam_beta1", "adam_beta2"),
    **_same("use {scheduler}", "lr_scheduler_type", "lr_scheduler"),
    **_same(_SCHEDULE, "lr_scheduler_kwargs"),
    **_same(_OPTIMIZER, "optim_args", "adam_epsilon"),
    **_same("use {device=cpu}", "use_cpu", "no_cuda", "cpu"),
    **_same(_ALWAYS, "save_safetensors", "average_tokens_across_devices",
        "bf16_full_eval", "fp16_full_eval", "eval_accumulation_steps"),
    **_same(
        _LOADER, "num_workers", "workers", "prefetch", "prefetch_factor", "pin_memory", "persistent_workers",
        "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_drop_last", "drop_last", "max_queue_size", "use_multiprocessing", "dataloader_config",
    ),
    **_same(
        "because the order belongs to the loader: pass a batch_sampler to the DataLoader",
        "group_by_length", "length_column_name",
    ),
    **_same(_WEIGHTS, "model_name_or_path", "pretrained", "pretrained_model_name_or_path", "init_checkpoint", "from_pretrained"),
    **_same(_NO_HUB, "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo"),
    **_same(_MODEL, "neftune_noise_alpha", "label_names"),
    "remove_unused_columns": "use {data.remove_unused_columns}",
    **_same(_NO_TPU, "tpu_num_cores", "tpu_name"),
}  # fmt: skip

# Accelerate's Accelerator and `accelerate launch`
_ACCELERATE = {
    "num_processes": "use {nproc_per_node}, processes of one node",
    "num_machines": "use {num_nodes}",
    "machine_rank": "use {node_rank}",
    "main_process_ip": "use {master_addr}",
    "main_process_port": "use {master_port}",
    "even_batches": "because the last batch may be short and is never padded",
    "step_scheduler_with_optimizer": "use {scheduler_interval}",
    "distributed_type": "use {backend}",
    **_same(_ORDER, "dispatch_batches", "use_seedable_sampler"),
    **_same(_PROCESSES, "multi_gpu", "gpu_ids"),
    **_same("use {compile}", "dynamo_backend", "torch_compile", "torch_compile_backend", "torch_compile_mode", "jit_compile"),
    **_same(_ALWAYS, "rng_types", "device_placement"),
}  # fmt: skip

# Keras's fit and compile, and its callbacks
_KERAS = {
    "loss": _LOSS,
    "validation_split": "because data goes to trainer.fit(): split the arrays, and pass validation_data=(x_val, y_val)",
    "steps_per_epoch": "use {max_steps}; an epoch is one pass over the data",
    "initial_epoch": _RESUME,
    "clipvalue": "because {gradient_clipping} is always by the global norm",
    "auto_scale_loss": "use {mixed_precision=fp16}, which scales the loss; {scaler_init_scale} sets the first scale",
    "patience": "use {early_stopping_patience}",
    "early_stopping": "use {early_stopping_patience}",
    "min_delta": "because any better value of {monitor} counts as an improvement",
    "restore_best_weights": "because the model keeps its last weights: use {keep_best}, which keeps the best checkpoint",
    "save_best_only": "use {keep_best} and {keep_latest_k}",
    "mode": "use {monitor_mode}",
    "weighted_metrics": "because a metric may return (sum, count): use Trainer(metrics=...) in code",
    **_same("use {gradient_clipping}", "clipnorm", "global_clipnorm", "clip_grad_norm", "grad_clip", "grad_clip_norm", "max_norm"),
    **_same(_DATA, "validation_data", "train_data", "val_data",
        "train_dataloader", "train_dataloaders", "val_dataloaders", "eval_dataloader", "train_dataset", "eval_dataset"),
    "validation_steps": "use {max_validation_batches}",
    "validation_batch_size": "because it belongs to the loader: pass a DataLoader with that batch_size as val_data",
    **_same(_VALIDATION, "validation_freq"),
    **_same("because it belongs to the data: pass it to trainer.fit(x=..., y=...) in code", "class_weight", "sample_weight"),
    **_same(_LOSS, "loss_weights"),
    "steps_per_execution": "because an update is one step: drop it",
    "run_eagerly": "because nothing is compiled unless {compile} is set: drop it",
    **_same(_OBJECT, "model", "optimizers", "schedulers", "loss_fn", "training_step", "metrics", "callbacks"),
}  # fmt: skip

# Ray's ScalingConfig, RunConfig and their parts
_RAY = {
    "use_gpu": "use {num_gpus}",
    "placement_strategy": "because Ray's own default is used",
    "failure_config": "use {max_restarts}",
    "max_failures": "use {max_restarts}",
    "checkpoint_config": "use {keep_latest_k} and {checkpoint_frequency}",
    "num_to_keep": "use {keep_latest_k}",
    "checkpoint_score_attribute": "use {monitor}",
    "checkpoint_score_order": "use {monitor_mode}",
    "stop": "use {max_steps}, {epochs} or {early_stopping_patience}",
    "log_to_file": _LOGS,
}

# Composer's Trainer
_COMPOSER = {
    "max_duration": "use {epochs} or {max_steps}",
    "grad_accum": "use {gradient_accumulation_steps}",
    "algorithms": "because they are callbacks: use Trainer(callbacks=[...]) in code",
    "save_num_checkpoints_to_keep": "use {keep_latest_k}",
    "dist_timeout": "use {timeout_s}",
    "progress_bar": "use {verbose}",
    "step_schedulers_every_batch": "use {scheduler_interval}",
    "train_subset_num_batches": _LIMIT,
    "load_weights_only": _WEIGHTS,
    **_same(_RESUME, "load_path", "autoresume", "resume", "checkpoint", "ckpt"),
}

# torchrun and other launchers
_TORCHRUN = {
    "nodes": "use {num_nodes}",
    "standalone": "because one node needs no rendezvous endpoint: drop it",
    "hosts": "because you start the command on each node: use {num_nodes}, {node_rank} and {master_addr}",
    "rank": "'train --world-size N --rank R' starts one process, rank R of N; {node_rank} is the index of a machine",
    "role": "because all workers have the same role",
    "module": "because --script FILE names the script",
    "start_method": "because workers are always forked from a process that has imported the engine",
    **_same("use {nproc_per_node}", "nproc", "np", "n_procs", "nprocs", "n_gpu"),
    **_same(_RENDEZVOUS, "rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr"),
    **_same(_LOGS, "log_dir", "redirects", "tee"),
}  # fmt: skip

# Names that scripts give their own arguments
_SCRIPTS = {
    "lr": "use {learning_rate}",
    "init_method": _RENDEZVOUS,
    **_same("use {epochs}", "num_epochs", "n_epochs", "nb_epochs"),
    **_same("use {batch_size}", "bs", "batch", "minibatch_size"),
    **_same("use {seed}", "random_seed", "random_state", "manual_seed"),
    **_same("use {communication_backend}", "dist_backend", "distributed_backend", "process_group_backend"),
    **_same(_PRECISION, "amp", "use_amp", "half", "torch_dtype", "amp_level", "amp_backend", "half_precision_backend"),
    **_same(_OPTIMIZER, "wd"),
}

# name -> the answer, in which `{setting}` and `{setting=value}` stand for our settings
PEERS: Mapping[str, str] = {
    **_LIGHTNING, **_HUGGING_FACE, **_ACCELERATE, **_KERAS, **_RAY, **_COMPOSER, **_TORCHRUN, **_SCRIPTS,
    **{name: answer for entry in REGISTRY.values() for name, answer in entry.peers.items()},
    **dict.fromkeys(LATER, _LATER),
}  # fmt: skip


def settings_in(answer: str) -> list[tuple[str, str | None]]:
    """Return the settings that an answer of PEERS names, each with its value or None."""
    return [(name, value or None) for name, value in _SETTING.findall(answer)]


def answer_for(name: str, written: Written = in_code) -> str | None:
    """Return the text that names our counterpart of the setting `name` of another tool, or None for an unknown name."""
    answer = PEERS.get(name.replace("-", "_"))
    return answer and _SETTING.sub(lambda found: written(found[1], _value(found[2])), answer)


def with_answer(refusal: str, answer: str) -> str:
    """Return the refusal of a name with the answer of PEERS: "refusal, because ..." or "refusal: use ..."."""
    return f"{refusal}, {answer}" if answer.startswith("because ") else f"{refusal}: {answer}"


def _value(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
