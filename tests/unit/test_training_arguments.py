"""TrainingArguments of transformers become settings that say the same, or are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from distributed import DistributedConfig, Trainer
from distributed.backends.deepspeed import _with_own_optimizer
from distributed.config.optimization import RateCurve
from distributed.errors import ConfigError
from tests.conftest import needs_backend

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def arguments(kind: str = "TrainingArguments", **given: Any) -> Any:
    return getattr(transformers, kind)(**{"use_cpu": True, "report_to": "none", "disable_tqdm": False, **given})


def translated(**given: Any) -> dict[str, Any]:
    return DistributedConfig.from_training_arguments(arguments(**given)).given


def test_the_defaults_are_those_of_transformers_and_not_ours() -> None:
    config = DistributedConfig.from_training_arguments(arguments())
    assert config.given == {
        "batch_size": 8, "epochs": 3, "learning_rate": 5e-5, "optimizer": "adamw", "weight_decay": 0.0, "betas": (0.9, 0.999),
        "scheduler": "linear", "gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "seed": 42, "deterministic": False,
        "log_every_n_steps": 500, "checkpoint_frequency": None, "checkpoint_every_n_steps": 500, "keep_latest_k": 1 << 30,
        "compile": False, "validate_at_start": False, "device": "cpu", "data": {"remove_unused_columns": True},
    }  # fmt: skip
    assert config.notices == ()
    assert DistributedConfig.from_training_arguments(arguments("Seq2SeqTrainingArguments")).given == config.given


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"max_steps": 70}, {"max_steps": 70, "epochs": 1 << 30}),
        ({"warmup_steps": 10}, {"warmup_steps": 10}),
        ({"warmup_steps": 0.1, "max_steps": 71}, {"warmup_steps": 8}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 3},
            {"scheduler": "constant", "warmup_steps": 3},
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 3.0}},
            {"scheduler": "polynomial", "scheduler_power": 3.0, "min_learning_rate": 1e-7},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            {"scheduler": "cosine", "min_learning_rate": 1e-6},
        ),
        ({"optim": "sgd"}, {"optimizer": "sgd"}),
        ({"max_grad_norm": 0.5, "bf16": True}, {"gradient_clipping": 0.5, "mixed_precision": "bf16"}),
        ({"gradient_checkpointing": True, "torch_compile": True}, {"activation_checkpointing": True, "compile": True}),
        ({"eval_strategy": "steps", "logging_steps": 5}, {"validate_every_n_steps": 5, "log_every_n_steps": 5}),
        ({"save_strategy": "epoch", "save_total_limit": 2}, {"checkpoint_frequency": 1, "keep_latest_k": 2}),
        ({"save_strategy": "no"}, {"checkpoint_frequency": None}),
        ({"output_dir": "/tmp/out"}, {"checkpoint_dir": "/tmp/out"}),
        ({"report_to": ["tensorboard", "mlflow"]}, {"loggers": "tensorboard,mlflow"}),
        ({"full_determinism": False, "disable_tqdm": True}, {"verbose": False}),
        ({"ddp_timeout": 60}, {"timeout_s": 60.0}),
        ({"ddp_find_unused_parameters": True}, {"ddp": {"find_unused_parameters": True}}),
        ({"train_sampling_strategy": "sequential"}, {"shuffle": False}),
        ({"adam_beta1": 0.8, "adam_beta2": 0.95}, {"betas": (0.8, 0.95)}),
        ({"full_determinism": True}, {"deterministic": True}),
        ({"eval_on_start": True}, {"validate_at_start": True}),
        ({"remove_unused_columns": False}, {"data": {"remove_unused_columns": False}}),
        ({"resume_from_checkpoint": "runs/a"}, {"resume_from_checkpoint": "runs/a"}),
        ({"ddp_bucket_cap_mb": 7, "ddp_static_graph": True}, {"ddp": {"bucket_cap_mb": 7, "static_graph": True}}),
        (
            {"fsdp": True, "fsdp_config": {"min_num_params": 100, "reshard_after_forward": False}},
            {"backend": "fsdp", "fsdp": {"min_num_params": 100, "reshard_after_forward": False}},
        ),
        (
            {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["A", "B"], "cpu_offload": False}},
            {"backend": "fsdp", "fsdp": {"wrap_classes": "A,B", "cpu_offload": False}},
        ),
        (
            {"metric_for_best_model": "accuracy", "eval_strategy": "epoch"},
            {"monitor": "val_accuracy", "monitor_mode": "max"},
        ),
    ],
)
def test_an_argument_becomes_the_setting_of_the_same_meaning(given: Any, settings: Any) -> None:
    found = translated(**given)
    assert {name: found.get(name) for name in settings} == settings
    assert ("checkpoint_every_n_steps" in found) is ("save_strategy" not in given)


def test_the_communication_backend_is_kept() -> None:
    given = arguments()  # with ddp_backend among its arguments, transformers would start a process group
    given.ddp_backend = "gloo"
    assert DistributedConfig.from_training_arguments(given).communication_backend == "gloo"


def test_no_clipping_stays_no_clipping_and_a_fraction_needs_the_number_of_updates() -> None:
    assert "gradient_clipping" not in translated(max_grad_norm=0)
    with pytest.raises(
        ConfigError, match=r"warmup_steps=0.1 is a fraction of the updates of the run: pass num_training_steps"
    ):
        translated(warmup_steps=0.1)
    given = arguments(warmup_steps=0.1)
    assert DistributedConfig.from_training_arguments(given, num_training_steps=200).warmup_steps == 20


def test_what_changes_no_number_is_listed() -> None:
    given = arguments(
        "Seq2SeqTrainingArguments", per_device_eval_batch_size=3, run_name="a", predict_with_generate=True,
        load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch",
    )  # fmt: skip
    config = DistributedConfig.from_training_arguments(given)
    words = " ".join(config.notices)
    assert all(name in words for name in ("per_device_eval_batch_size", "run_name", "predict_with_generate"))
    assert "load_best_model_at_end of TrainingArguments keeps the best checkpoint" in words
    assert config.keep_best and config.monitor == "val_loss" and config.monitor_mode == "min"


def test_what_cannot_be_honoured_is_refused_all_at_once() -> None:
    refused = {
        "num_train_epochs": 2.5, "data_seed": 3, "optim": "adafactor", "lr_scheduler_type": "inverse_sqrt",
        "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0, "dataloader_num_workers": 2, "dataloader_drop_last": True,
        "adam_epsilon": 1e-6, "save_only_model": True, "eval_delay": 1, "auto_find_batch_size": True, "debug": "underflow_overflow",
        "train_sampling_strategy": "group_by_length", "ddp_broadcast_buffers": False, "include_for_metrics": ["inputs"],
        "push_to_hub": True, "torch_empty_cache_steps": 5,
    }  # fmt: skip
    with pytest.raises(ConfigError) as raised:
        translated(**refused)
    for name in refused:
        assert f"{name}=" in str(raised.value), name
    assert "\n" not in str(raised.value)
    given = arguments(fsdp=True, fsdp_config={"xla": True, "xla_fsdp_settings": {"a": 1}})
    with pytest.raises(ConfigError, match="sets xla, which has no counterpart: use the option group fsdp"):
        DistributedConfig.from_training_arguments(given)
    given = arguments()
    given.deepspeed = {"zero_optimization": {"stage": 2}}
    config = DistributedConfig.from_training_arguments(given)
    assert config.backend == "deepspeed" and config.deepspeed["deepspeed_config"] == given.deepspeed
    with pytest.raises(ConfigError, match="a dict is not TrainingArguments"):
        DistributedConfig.from_training_arguments({})


def test_an_optimizer_and_a_schedule_of_the_script_replace_those_of_the_arguments(capsys: Any) -> None:
    config = DistributedConfig.from_training_arguments(arguments(warmup_steps=2))
    data = torch.utils.data.TensorDataset(torch.ones(16, 1), torch.ones(16, 1))
    model = torch.nn.Linear(1, 1)
    sgd, rates = torch.optim.SGD(model.parameters(), lr=0.5), []

    def halving(optimizer: Any) -> Any:
        rates.append(optimizer)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    trainer = Trainer(model, config, optimizer=sgd, scheduler=halving, backend="single", max_steps=2, verbose=True)
    trainer.fit(torch.utils.data.DataLoader(data, batch_size=4))
    assert rates == [sgd] and sgd.param_groups[0]["lr"] == 0.125
    told = capsys.readouterr().out
    assert "learning_rate of TrainingArguments has no effect: the script passes an optimizer" in told
    assert "warmup_steps of TrainingArguments has no effect: the script passes a schedule" in told
    for given in ({"optimizer": "sgd"}, {"scheduler": "constant"}, {"optimizer": "sgd", "momentum": 0.9}):
        merged = Trainer(model, config, **given).setup.merged
        assert {name: getattr(merged.config, name) for name in given} == given and merged.config.learning_rate == 5e-5
        assert merged.source("learning_rate") == "file" and merged.source(next(iter(given))) == "code"
    changed = dataclasses.replace(config, optimizer="sgd")
    assert Trainer(model, changed).setup.merged.source("optimizer") == "code"


def test_an_optimizer_in_the_deepspeed_config_replaces_that_of_the_arguments() -> None:
    needs_backend("deepspeed")
    given = arguments(weight_decay=0.25)
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    given.deepspeed = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": 2}}
    config = DistributedConfig.from_training_arguments(given)
    own = config.deepspeed["deepspeed_config"]
    assert own["optimizer"]["params"] == {**params, "betas": [0.9, 0.999], "weight_decay": 0.25}
    assert own["zero_optimization"] == given.deepspeed["zero_optimization"]
    assert not {"optimizer", "betas", "weight_decay"} & config.given.keys() and config.learning_rate == 5e-5
    job = _with_own_optimizer(Trainer(torch.nn.Linear(1, 1), config).setup.job, own, config)
    assert job.optimizer.keywords["weight_decay"] == 0.25 and job.optimizer.keywords["lr"] == 5e-5


def test_every_argument_is_translated_listed_or_refused() -> None:
    """An argument with a value of no meaning to us never passes in silence."""
    base = arguments()
    plain = DistributedConfig.from_training_arguments(base)
    # Without the arguments that switch them on, these have no effect in transformers either.
    harmless = {"eval_steps", "greater_is_better", "dataloader_pin_memory", "fsdp_config"}
    words = {"eval_strategy": "steps", "logging_strategy": "no", "save_strategy": "no", "metric_for_best_model": "f1"}
    for field in dataclasses.fields(base):
        if field.name in harmless:
            continue
        changed = arguments()
        value = getattr(changed, field.name)
        odd = not value if isinstance(value, bool) else 7 if isinstance(value, (int, float)) else {"x": True}
        odd = words.get(field.name, odd)
        object.__setattr__(changed, field.name, odd)
        try:
            config = DistributedConfig.from_training_arguments(changed)
        except ConfigError:
            continue
        assert config != plain or config.notices != plain.notices, field.name


def test_training_follows_the_rates_of_transformers_after_the_warmup() -> None:
    given = arguments(max_steps=10, warmup_steps=2, learning_rate=0.5, logging_steps=1)
    config = DistributedConfig.from_training_arguments(given)
    curve = RateCurve(str(config.scheduler), 10, config.warmup_steps, config.min_learning_rate)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    theirs = transformers.get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=10)
    for step in range(10):
        if step >= 2:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * curve.factor(step, 0.5))
        optimizer.step()
        theirs.step()
    history = Trainer(model, config, loss_fn=torch.nn.functional.mse_loss, verbose=False).fit(
        torch.utils.data.TensorDataset(torch.ones(16, 1), torch.ones(16, 1))
    )
    assert history.steps == 10
