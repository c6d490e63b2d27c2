"""A user's own DeepSpeed config beside our settings, and builds of C++ operators, without DeepSpeed."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from distributed import ConfigError, DeepSpeedTrainer, PyTorchDDPTrainer, ResourceError, Trainer
from distributed.backends._deepspeed import config_file, operators
from distributed.config.registry import BackendEntry, require_installed
from tests.conftest import needs_backend

ZERO_3 = {"zero_optimization": {"stage": 3}}


@pytest.fixture(autouse=True)
def _is_installed():
    needs_backend("deepspeed")


def model():
    raise AssertionError("nothing is built here")


def trainer(**settings):
    return DeepSpeedTrainer(model, nproc_per_node=2, **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"deepspeed_config": "/no/such.json"}, "cannot be read (No such file or directory)"),
        ({"deepspeed_config": 5}, "deepspeed.deepspeed_config=5 is not a mapping"),
        ({"deepspeed_config": ZERO_3, "zero_stage": 2}, "deepspeed.zero_stage=2 is not deepspeed_config.zero_optimization.stage=3"),
        ({"deepspeed_config": {"zero_optimization": {"stage": 1}}, "zero_stage": 0}, "deepspeed.zero_stage=0 is not"),
        (
            {"deepspeed_config": {"gradient_clipping": 1.0}, "gradient_clipping": 0.5},
            "gradient_clipping=0.5 (code) is not deepspeed_config.gradient_clipping=1.0: make them agree",
        ),
        (
            {"deepspeed_config": {"train_micro_batch_size_per_gpu": 4}, "batch_size": 8},
            "batch_size=8 (code) is not deepspeed_config.train_micro_batch_size_per_gpu=4",
        ),
        (
            {"deepspeed_config": {"bf16": {"enabled": True}, **ZERO_3}, "mixed_precision": "fp16"},
            "mixed_precision='fp16' (code) is not deepspeed_config.bf16.enabled=True",
        ),
        (
            {"deepspeed_config": {"bf16": {"enabled": False}, **ZERO_3}, "mixed_precision": "bf16"},
            "mixed_precision='bf16' contradicts deepspeed_config.bf16.enabled=False",
        ),
        ({"deepspeed_config": {"bf16": True}}, "deepspeed_config.bf16=True is not a section: write {...}"),
        ({"deepspeed_config": {"optimizer": "auto"}}, "deepspeed_config.optimizer='auto' is not a section"),
        ({"deepspeed_config": {"optimizer": {"type": "AdamW", "params": "auto"}}}, "optimizer.params='auto' is not a section"),
        ({"deepspeed_config": {"steps_per_print": float("inf")}}, "steps_per_print=inf is not a number that fits"),
        ({"deepspeed_config": {"train_batch_size": 2.5}}, "train_batch_size=2.5 is not a number that fits"),
        ({"deepspeed_config": {"zero_optimisation": {}}}, "zero_optimisation has no effect here (did you mean 'zero_optimization'?)"),
        ({"deepspeed_config": {"zero_optimization": {"stge": 1}}}, "zero_optimization.stge has no effect here (did you mean 'stage'?)"),
        (
            {"deepspeed_config": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
            "offload_param.device='nvme' is not in this version",
        ),
        ({"deepspeed_config": {"zero_optimization": {"stage": 5}}}, "zero_optimization.stage=5 is not a stage: set 0, 1, 2 or 3"),
        ({"deepspeed_config": {"zero_optimization": {"stage": "two"}}}, "zero_optimization.stage='two' is not a stage"),
        ({"deepspeed_config": {"train_batch_size": "many"}}, "deepspeed_config.train_batch_size='many' is not a number"),
        ({"deepspeed_config": {"optimizer": {"type": "Lamb"}}}, "optimizer.type='Lamb' is not created here"),
        ({"offload_param": True}, "offloading parameters needs zero_stage=3, not 2"),
        ({"zero_stage": 0, "offload_optimizer": True}, "offloading the optimizer needs zero_stage=1, 2 or 3, not 0"),
        ({"zero_stage": 0, "native_checkpoint": True}, "native_checkpoint=True needs zero_stage=1, 2 or 3, not 0"),
        ({"cpu_adam": True}, "deepspeed.cpu_adam=True updates an offloaded optimizer"),
        ({"zero_stage": 0, "mixed_precision": "bf16"}, "mixed_precision='bf16' does not work with backend='deepspeed' with zero_stage=0"),
        ({"mixed_precision": "fp16", "device": "cpu"}, "does not work with backend='deepspeed' on CPUs: set mixed_precision='bf16'"),
        ({"dtype": "float64"}, "its engine has no float64"),
        ({"compile": True}, "its hooks would break the compiled graph"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_both_sides_and_the_fix(settings, said):
    with pytest.raises(ConfigError) as caught:
        trainer(**settings)
    assert said in str(caught.value)


def test_what_the_config_says_of_our_settings_counts_as_given(tmp_path):
    own = {
        "train_batch_size": 64, "gradient_accumulation_steps": 4, "gradient_clipping": 0.7, "steps_per_print": 5,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"lr": 3e-4}},
    }  # fmt: skip
    (tmp_path / "own.json").write_text(json.dumps(own))
    for given in (own, str(tmp_path / "own.json"), tmp_path / "own.json"):
        made = trainer(deepspeed_config=given, gradient_clipping=0.7)
        config = made.merged.config
        assert (config.global_batch_size, config.gradient_accumulation_steps) == (64, 4)
        assert (config.gradient_clipping, config.log_every_n_steps, config.mixed_precision) == (0.7, 5, "bf16")
        assert (config.learning_rate, made.backend.stage) == (3e-4, 1)
        assert made.merged.is_given("learning_rate")
        assert made.merged.config.deepspeed["deepspeed_config"] == own  # what a run writes down and workers get


def test_auto_takes_ours():
    own = {"gradient_clipping": "auto", "train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}
    made = trainer(deepspeed_config=own, gradient_clipping=0.2, zero_stage=1)
    assert made.merged.config.gradient_clipping == 0.2 and made.backend.stage == 1
    assert config_file.merged(own | {"fp16": {"enabled": "auto"}}, {"gradient_clipping": 0.2}) == {
        "gradient_clipping": 0.2, "zero_optimization": {}, "fp16": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "Adam", "params": {}}, ("AdamW", {"weight_decay": 0.0, "lr": 0.1})),
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": "auto"}}, ("Adam", {"weight_decay": 0.0, "lr": 0.1})),
        ({"type": "AdamW", "params": {"weight_decay": "auto", "eps": 1e-6}}, ("AdamW", {"eps": 1e-6, "lr": 0.1})),
    ],
)
def test_an_optimizer_section_means_what_deepspeed_means_by_it(section, expected):
    assert config_file.adam({"optimizer": section}, 0.1) == expected


def test_seed_samples_select_deepspeed_and_say_so():
    """As the documents have them, but for the keyword arguments that DeepSpeedConfig does not take and the GPUs."""
    from deepspeed import DeepSpeedConfig

    config = DeepSpeedConfig({
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    })  # fmt: skip
    made = PyTorchDDPTrainer(model=model, deepspeed_config=config, nproc_per_node=2)
    assert (made.plan.backend, made.backend.stage, made.merged.config.global_batch_size) == ("deepspeed", 3, 64)
    assert made.backend.options.offloads("optimizer") and made.backend.options.offloads("param")

    made = PyTorchDDPTrainer(model=model, nproc_per_node=4, zero_stage=3)
    assert (made.plan.backend, made.backend.stage) == ("deepspeed", 3)
    assert "deepspeed.zero_stage selects backend deepspeed" in made.merged.notices
    assert PyTorchDDPTrainer(model=model, nproc_per_node=2).plan.backend == "pytorch-ddp"
    assert (
        Trainer(model=model, nproc_per_node=2, zero_stage=3).plan.backend == "pytorch-ddp"
    )  # one script, many backends


def test_a_missing_library_is_named_with_the_command_that_installs_it():
    entry = BackendEntry("some", "a.b", "C", "some", (), ("json", "no_such_library"), "make some", "")
    with pytest.raises(
        ResourceError, match="'some' needs no_such_library, which is not installed: run make some"
    ) as caught:
        require_installed(entry)
    assert caught.value.exit_code == 3


# ------------------------------------------------------------------ operators


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The directory of compiled operators, ours and empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "")
    where, is_ours = operators.directory()
    assert is_ours and tmp_path in where.parents
    (where / "op").mkdir(parents=True)
    return where


def test_a_killed_builds_lock_is_gone_before_the_next_build(place):
    lock, said = place / "op" / "lock", []
    lock.touch()

    def make():
        assert not lock.exists()
        assert os.environ["TORCH_EXTENSIONS_DIR"] == str(place)
        (place / "op" / "op.so").touch()
        return "operator"

    assert operators.load("op", make, 5, said.append) == "operator"
    assert (
        len(said) == 2
        and said[0].startswith("compiling DeepSpeed's op (C++, once")
        and said[1].startswith("compiled op in")
    )
    lock.touch()  # of a process that was killed while it loaded what another had compiled
    assert operators.load("op", make, 5, said.append) == "operator"
    assert len(said) == 2


def test_locks_in_a_directory_of_the_users_own_stay_as_long_as_they_are_young(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert operators.directory() == (tmp_path, False)
    young, old = tmp_path / "one" / "lock", tmp_path / "two" / "lock"
    for lock in (young, old):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, (0, time.time() - 3600))
    assert operators.remove_stale_locks(tmp_path, False) == [old]
    assert young.exists()


def test_another_process_build_is_waited_for_no_longer_than_the_limit(place):
    with (place / "building.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match=r"op was not compiled by another process within start_timeout=0\.2 s"):
            operators.load("op", lambda: None, 0.2, print)


def test_a_compiler_that_fails_is_quoted_in_one_line(place):
    def make():
        raise RuntimeError("Error building extension 'op'\nop.cpp:3:5: error: expected ';'\nninja: stopped")

    with pytest.raises(ResourceError, match=r"op cannot be compiled .*expected ';'.*install g.. and ninja"):
        operators.load("op", make, 5, lambda text: None)


def test_operators_that_others_can_write_are_not_loaded(place):
    said = []
    (place / "op" / "op.so").touch()
    (place / "op" / "op.so").chmod(0o666)
    with pytest.raises(ResourceError, match=r"other users can write to .*/op/op\.so: remove it, or name another"):
        operators.load("op", lambda: "operator", 5, said.append)
    assert said == []


def test_an_open_directory_of_the_users_own_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "op.so").touch()
    tmp_path.chmod(0o777)
    said = []
    assert operators.load("op", lambda: "operator", 5, said.append) == "operator"
    assert len(said) == 1 and "other users can write there: name a directory of mode 0700" in said[0]
