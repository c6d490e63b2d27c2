"""Names of other trainers and launchers are answered with our setting, or with the reason why there is none."""

from __future__ import annotations

import re

import pytest

from distributed import DistributedConfig, Trainer
from distributed.cli.__main__ import run
from distributed.cli.train import ALIAS_SWITCHES, make_parser, read_flags, read_overrides
from distributed.cli.train import ALIASES as FLAG_ALIASES
from distributed.config.fields import in_code, in_file, rules
from distributed.config.flags import SETTINGS, as_flag
from distributed.config.merging import read_config_file, split_sweep
from distributed.config.peers import PEERS, answer_for, settings_in, with_answer
from distributed.config.registry import REGISTRY
from distributed.config.settings import ALIASES, GROUPS, SWEEP_ALIASES, canonical, check_setting, option_names
from distributed.errors import ConfigError

HIDDEN = {*ALIASES, *FLAG_ALIASES, *ALIAS_SWITCHES, "world_size", "no_nccl"}
FIELDS = set(DistributedConfig.__dataclass_fields__) - set(GROUPS)
OURS = FIELDS | set(option_names())
RUN_FLAGS = {"script", "config", "set", "run_dir", "resume", "dry_run", "help"}

# What other tools' own documentation shows first, each with our setting, or None where there is none.
WANTED = {
    "val_check_interval": "validate_every_n_steps", "check_val_every_n_epoch": "validate_every_n_steps",
    "eval_steps": "validate_every_n_steps", "eval_strategy": "validate_every_n_steps", "eval_on_start": "validate_at_start",
    "limit_val_batches": "max_validation_batches", "validation_steps": "max_validation_batches",
    "save_steps": "checkpoint_every_n_steps", "save_total_limit": "keep_latest_k", "num_train_epochs": "epochs",
    "max_epochs": "epochs", "max_duration": "epochs", "num_epochs": "epochs",
    "per_device_train_batch_size": "batch_size", "accumulate_grad_batches": "gradient_accumulation_steps",
    "gradient_clip_val": "gradient_clipping", "max_grad_norm": "gradient_clipping", "clipnorm": "gradient_clipping",
    "fp16": "mixed_precision", "bf16": "mixed_precision", "precision": "mixed_precision", "amp": "mixed_precision",
    "report_to": "tensorboard", "logger": "tensorboard", "log_with": "tensorboard", "output_dir": "checkpoint_dir",
    "strategy": "backend", "accelerator": "device", "devices": "nproc_per_node", "nproc": "nproc_per_node",
    "num_processes": "nproc_per_node", "num_machines": "num_nodes", "machine_rank": "node_rank",
    "main_process_ip": "master_addr", "main_process_port": "master_port",
    "num_workers": None, "dataloader_num_workers": None, "prefetch": None, "rdzv_backend": "master_addr",
    "logging_steps": "log_every_n_steps", "warmup_ratio": "warmup_steps", "optim": "optimizer", "lr": "learning_rate",
    "lr_scheduler_type": "scheduler", "adam_beta1": "betas", "load_best_model_at_end": "keep_best", "metric_for_best_model": "monitor",
    "greater_is_better": "monitor_mode", "torch_compile": "compile", "full_determinism": "deterministic",
    "use_cpu": "device", "use_gpu": "num_gpus", "failure_config": "max_restarts", "num_to_keep": "keep_latest_k",
    "resources_per_worker": "ray.cpus_per_worker", "ddp_find_unused_parameters": "ddp.find_unused_parameters",
    "validation_data": None, "validation_split": None, "steps_per_epoch": "max_steps", "loss": None,
    "patience": "early_stopping_patience", "device_train_microbatch_size": "batch_size",
    "save_folder": "checkpoint_dir", "dist_timeout": "timeout_s", "limit_train_batches": "max_steps",
    "fast_dev_run": "max_steps", "detect_anomaly": "nan_policy", "resume": "resume_from_checkpoint",
    "ckpt_path": "resume_from_checkpoint", "run_dir": "checkpoint_dir", "sync_batchnorm": None, "load_weights_only": "init_from", "push_to_hub": None,
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_a_name_of_another_tool_is_answered(name):
    named = [setting for setting, _ in settings_in(PEERS[name])]
    assert (WANTED[name] in named) if WANTED[name] else "because" in PEERS[name]
    with pytest.raises(
        ConfigError, match=f"^{re.escape(with_answer(f'{name} is not a setting', str(answer_for(name))))}$"
    ):
        Trainer(print, **{name: 1})


def test_every_setting_that_an_answer_names_exists_and_takes_the_value():
    for name, answer in PEERS.items():
        for setting, text in settings_in(answer):
            assert setting in OURS, (name, setting)
            if text is not None:
                value = {"true": True, "false": False}.get(text, text)
                value = int(value) if str(value).isdigit() else value
                check_setting(setting, value, rules(DistributedConfig)[setting])


def test_every_answer_names_a_setting_or_says_why_there_is_none():
    for name, answer in PEERS.items():
        is_later = "not in this version" in answer
        assert is_later or settings_in(answer) or answer.startswith("because "), name
        assert not re.search(r"[{}]", str(answer_for(name))), name
        for word in re.findall(r"(?<!\w)--([a-z][\w-]+)", answer):
            assert f"--{word}" in make_parser()._option_string_actions, (name, word)


def test_no_answer_is_for_a_name_that_is_taken_and_none_offers_an_alias():
    # `rank` is a hidden flag that makes a command one process of a run; as a setting it is answered.
    assert not PEERS.keys() & (OURS | HIDDEN - {"rank"} | set(GROUPS))
    assert {setting for answer in PEERS.values() for setting, _ in settings_in(answer)} & (HIDDEN - OURS) == set()


def test_an_answer_is_written_as_the_question_was(tmp_path):
    (tmp_path / "c.yaml").write_text("fp16: true\n")
    with pytest.raises(ConfigError, match=r"line 1: fp16 is not a setting: use mixed_precision: fp16$"):
        read_config_file(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=r"^fp16 is not a setting: use mixed_precision='fp16'$"):
        Trainer(print, fp16=True)
    with pytest.raises(ConfigError, match=r"^fp16 is not a setting: use --mixed-precision fp16$"):
        read_overrides(None, {}, ["fp16=true"], "a.py", ())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc", "2"], "--nproc is not a flag of train: use --nproc-per-node;"),
        (["-np", "2"], "-np is not a flag of train: use --nproc-per-node;"),
        (["--precision", "16"], "--precision is not a flag of train: use --mixed-precision bf16 or --mixed-precision fp16;"),
        (["--num_train_epochs=3"], "--num-train-epochs is not a flag of train: use --epochs;"),
        (["--warmup-ratio", "0.1"], "--warmup-ratio is not a flag of train: use --set warmup_steps=VALUE,"),
        (["--use-cpu"], "--use-cpu is not a flag of train: use --device cpu;"),
        (["--disable-tqdm"], "--disable-tqdm is not a flag of train: use --no-verbose;"),
        (["--num-workers", "4"], "--num-workers is not a flag of train, because it belongs to the loader"),
    ],
)  # fmt: skip
def test_a_flag_of_another_tool_is_answered_with_our_flag(arguments, said):
    with pytest.raises(ConfigError) as caught:
        run(["train", "--script", "here.py", *arguments])
    assert str(caught.value).startswith(said)
    assert "a script's own flags follow after --" in str(caught.value)


def misspelt(name):
    return {name + "s", name[:-1], name.replace("_", ""), name[0] + name[2:], name + "_x"}


@pytest.mark.parametrize("alias", sorted(HIDDEN))
def test_no_hint_leads_to_a_hidden_alias(alias):
    for typo in misspelt(alias) - OURS - HIDDEN:
        with pytest.raises(ConfigError) as in_code_:
            canonical({typo: 1})
        with pytest.raises(ConfigError) as as_flag_:
            read_flags(make_parser(), [f"--{typo.replace('_', '-')}", "1"])
        for error in (in_code_, as_flag_):
            hint = re.search(r"did you mean '([^']+)'", str(error.value))
            found = hint[1].removeprefix("--").removeprefix("no-").replace("-", "_") if hint else None
            assert found is None or found in OURS | set(GROUPS) | RUN_FLAGS, (typo, found)


def test_a_misspelt_option_is_answered_with_its_whole_name():
    with pytest.raises(ConfigError, match=r"did you mean 'ddp\.find_unused_parameters'"):
        canonical({"find_unused_parameter": True})


def test_a_sweep_is_told_of_our_name_and_keeps_its_own():
    settings, others, warnings = split_sweep({"num_train_epochs": 3, "optimizer_kind": "adam", "save_intervals": 1})
    assert settings == {} and set(others) == {"num_train_epochs", "optimizer_kind", "save_intervals"}
    assert warnings[0] == "config has 'num_train_epochs', which is not a setting (use epochs): kept as a hyperparameter"
    assert not any("save_interval'" in warning for warning in warnings[1:])
    assert SWEEP_ALIASES.keys() <= PEERS.keys()


# the example in an error

EXAMPLES = [
    ("epochs", "three", "epochs=1", "epochs: 1", "--epochs 1"),
    ("warmup_steps", "x", "warmup_steps=0", "warmup_steps: 0", "--set warmup_steps=0"),
    ("deterministic", "maybe", "deterministic=True", "deterministic: true", "--deterministic"),
    ("learning_rate", 0, "learning_rate=0.001", "learning_rate: 0.001", "--learning-rate 0.001"),
    ("ddp", 3, "ddp={...}", "ddp: {...}", "--set ddp={...}"),
]


@pytest.mark.parametrize(("name", "value", *("code", "file", "flag")), EXAMPLES)
def test_the_example_in_an_error_is_written_as_the_setting_was(name, value, code, file, flag, tmp_path):
    (tmp_path / "c.yaml").write_text(f"{name}: {value}\n")
    for call, example in (
        (lambda: DistributedConfig(**{name: value}), code),
        (lambda: read_config_file(tmp_path / "c.yaml"), file),
        (lambda: read_overrides(None, {}, [f"{name}={value}"], "a.py", ()), flag),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).endswith(f": give one, such as {example}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"epochs": "three"}, "epochs='three' is not a whole number: give one, such as --epochs 1"),
        ({"epochs": "0"}, "epochs=0 must be at least 1: give --epochs 1 or more"),
        ({"master_port": "70000"}, "master_port=70000 must be at most 65535: give --master-port 65535 or less"),
    ],
)
def test_a_wrong_flag_is_answered_with_a_flag(flags, said):
    with pytest.raises(ConfigError) as caught:
        read_overrides(None, flags, [], "a.py", ())
    assert str(caught.value) == said


def test_a_setting_is_written_in_three_ways():
    written = [
        [how("keep_best", False), how("epochs", 3), how("device", "cpu"), how("ddp.comm_hook", None)]
        for how in (in_code, in_file, as_flag)
    ]
    assert written == [
        ["keep_best=False", "epochs=3", "device='cpu'", "ddp.comm_hook"],
        ["keep_best: false", "epochs: 3", "device: cpu", "ddp.comm_hook"],
        ["--no-keep-best", "--epochs 3", "--device cpu", "--set ddp.comm_hook=VALUE"],
    ]
    assert all(as_flag(name, None) in make_parser()._option_string_actions for name in SETTINGS)
    assert {entry.group for entry in REGISTRY.values()} <= set(GROUPS)
