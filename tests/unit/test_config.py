"""DistributedConfig, the merging of its sources, and the arithmetic of a run."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import distributed
from distributed.backends.capabilities import capabilities_of
from distributed.config.merging import Overrides, config_yaml, merge, read_config_file, split_sweep
from distributed.config.plan import BatchPlan, ProcessPlan, in_effect, plan_batch, plan_processes
from distributed.config.registry import REGISTRY
from distributed.config.settings import ALIASES, DistributedConfig, canonical
from distributed.errors import ConfigError, ResourceError, nearest
from distributed.launching.request import Handover, running_script
from distributed.testing import FakeBackend, FakeOptions
from distributed.trainer import Trainer
from tests.conftest import clean_environment


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_sise": 3}, ["batch_sise", "batch_size"]),
        ({"wrap_classes": "x"}, ["wrap_classes is an option of fsdp", "fsdp={'wrap_classes': ...} in code", "--set"]),
        ({"run_dir": "x"}, ["run_dir is not a setting", "--run-dir", "checkpoint_dir"]),
        ({"batch_size": 0}, ["batch_size=0", "at least 1"]),
        ({"epochs": -1}, ["epochs=-1", "at least 1"]),
        ({"learning_rate": 0}, ["learning_rate=0", "greater than 0", "such as learning_rate=0.001"]),
        ({"learning_rate": 10**400}, ["finite"]),
        ({"seed": -1}, ["seed=-1", "at least 0"]),
        ({"seed": 2**64}, ["seed=18446744073709551616", "at most 18446744073709551615"]),
        ({"master_port": 65536}, ["master_port=65536", "at most 65535"]),
        ({"timeout_s": 1e300}, ["timeout_s=1e+300", "at most 100000000"]),
        ({"checkpoint_dir": ""}, ["checkpoint_dir=''", "empty"]),
        ({"learning_rate": float("nan")}, ["learning_rate=nan", "finite"]),
        ({"gradient_clipping": "much"}, ["gradient_clipping='much'", "number"]),
        ({"epochs": 1.5}, ["epochs=1.5", "whole number"]),
        ({"epochs": True}, ["epochs=True", "whole number"]),
        ({"backend": "nccl"}, ["transport", "--communication-backend nccl"]),
        ({"backend": "pytorch_ddp"}, ["pytorch_ddp", "pytorch-ddp"]),
        ({"mixed_precision": "fp8"}, ["fp8", "no, fp16, bf16"]),
        ({"mixed_precision": 1}, ["mixed_precision=1", "no, fp16, bf16"]),
        ({"backend": "pipeline"}, ["backend='pipeline' is not in this version", "pytorch-ddp"]),
        ({"pipeline": {"stages": 2}}, ["pipeline is not a setting", "not in this version", "drop"]),
        ({"nan_policy": "stopp"}, ["stopp", "stop"]),
        ({"ddp": {"bucket_mb": 3}}, ["ddp.bucket_mb", "bucket_cap_mb"]),
        ({"ddp": {"bucket_cap_mb": 0}}, ["ddp.bucket_cap_mb=0", "greater than 0"]),
        ({"ddp": 3}, ["ddp=3", "mapping"]),
        ({"warmup_steps": 2, "warmup_start": 2}, ["warmup_start=2", "at most 1"]),
        ({"profile_warmup": 0}, ["profile_warmup=0", "at least 1"]),
        ({"num_nodes": 2, "node_rank": 2}, ["node_rank=2", "num_nodes=2"]),
        ({"checkpoint_every_s": -5}, ["checkpoint_every_s=-5", "greater than 0"]),
    ],
)
def test_a_wrong_setting_is_answered_with_field_value_and_rule(given, words):
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(**given)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "halved"),
    [
        ((8, 1, 2, 16), (4, 2, 2, 16)),
        ((3, 1, 2, 6), (2, 2, 2, 6)),
        ((2, 2, 2, 6), (1, 4, 2, 6)),
        ((5, 3, 1, 13), (3, 6, 1, 13)),
    ],
)
def test_half_a_micro_batch_keeps_the_global_batch_and_the_learning_rate(given, halved):
    plan = BatchPlan(*given)
    smaller = plan.halved()
    assert dataclasses.astuple(smaller)[:4] == halved
    assert smaller.lr_ratio == plan.lr_ratio == smaller.halved().lr_ratio
    items = dataclasses.replace(smaller, full_batch_size=0)  # as of a batch sampler
    assert items.halved_already(1).lr_ratio == BatchPlan(-(-given[3] // (given[1] * given[2])), *given[1:]).lr_ratio
    assert items.halved_already(0) is items


def test_the_seed_documents_config_is_accepted_but_for_trackers():
    config = DistributedConfig(
        num_gpus=8, num_nodes=2, gpus_per_node=4, backend="pytorch-ddp", batch_size=32, epochs=100, learning_rate=0.001,
        mixed_precision=True, gradient_accumulation_steps=4, gradient_clipping=1.0, communication_backend="nccl",
        find_unused_parameters=False, checkpoint_frequency=10, checkpoint_dir="./checkpoints", log_every_n_steps=100,
    )  # fmt: skip
    assert config.given["num_gpus"] == 8 and "seed" not in config.given
    assert config.given["ddp"] == {"find_unused_parameters": False}
    assert config.notices == ("find_unused_parameters is read as ddp.find_unused_parameters",)


def test_a_config_is_frozen_with_its_groups_and_can_be_a_key():
    mine = {"bucket_cap_mb": 5}
    config = DistributedConfig(ddp=mine, epochs=2)
    with pytest.raises(AttributeError):
        config.epochs = 3
    for change in (
        lambda ddp: ddp.update(bucket_cap_mb=-3), lambda ddp: ddp.__setitem__("bucket_cap_mb", -3),
        lambda ddp: ddp.popitem(), lambda ddp: ddp.setdefault("a", 1), lambda ddp: ddp.__delitem__("bucket_cap_mb"),
        lambda ddp: ddp.__ior__({"a": 1}), lambda ddp: ddp.pop("bucket_cap_mb"), lambda ddp: ddp.clear(),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match="cannot be changed"):
            change(config.ddp)
    mine["bucket_cap_mb"] = -3
    same = DistributedConfig(bucket_size_mb=5, epochs=2)
    assert config.ddp == {"bucket_cap_mb": 5} and {config: "found"}[same] == "found"
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), dataclasses.replace(config, seed=0)):
        assert copied == config and hash(copied) == hash(config)
    assert json.loads(json.dumps(config.ddp)) == config.to_dict()["ddp"] == mine | {"bucket_cap_mb": 5}


# which settings were given


def test_a_replaced_config_has_given_what_the_first_had_and_what_was_changed():
    config = DistributedConfig(epochs=1, ddp={"bucket_cap_mb": 5})
    changed = dataclasses.replace(config, batch_size=8)
    assert changed.given == {"epochs": 1, "batch_size": 8, "ddp": {"bucket_cap_mb": 5}}
    assert dataclasses.replace(changed, batch_size=32).given == {**changed.given, "batch_size": 32}


@pytest.mark.parametrize("first", [{}, {"seed": 3}, {"backend": "single"}], ids=["nothing", "a setting", "the first"])
def test_a_default_that_is_passed_to_replace_counts_as_given(first):
    config = DistributedConfig(**first)
    assert dataclasses.replace(config, batch_size=32).given == {**first, "batch_size": 32}
    assert dataclasses.replace(config, backend=None, num_nodes=1, ddp={}).given == {
        **first, "backend": None, "num_nodes": 1, "ddp": {},
    }  # fmt: skip
    assert dataclasses.replace(dataclasses.replace(config, batch_size=32), epochs=2).given == {
        **first, "batch_size": 32, "epochs": 2,
    }  # fmt: skip
    names = list(DistributedConfig.__dataclass_fields__)
    every = {name: getattr(config, name) for name in names}
    assert list(dataclasses.replace(config, **every).given) == names
    assert [field.name for field in dataclasses.fields(config)] == names == list(dataclasses.asdict(config))


def test_a_replaced_config_has_the_notices_of_the_first_and_its_own():
    config = DistributedConfig(bucket_size_mb=5, seed=3)
    assert config.notices == ("bucket_size_mb is read as ddp.bucket_cap_mb",)
    assert dataclasses.replace(config, epochs=2).notices == config.notices
    changed = dataclasses.replace(config, bucket_size_mb=7, world_size=2, static_graph=True)
    assert changed.notices == (
        *config.notices, "world_size is read as nproc_per_node", "static_graph is read as ddp.static_graph",
    )  # fmt: skip
    assert changed.given == {"nproc_per_node": 2, "seed": 3, "ddp": {"bucket_cap_mb": 7, "static_graph": True}}


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, dataclasses.replace, lambda config: pickle.loads(pickle.dumps(config))],
    ids=["copy", "deepcopy", "replace", "pickle"],
)
def test_a_copy_has_given_what_the_first_had(copied):
    config = DistributedConfig(epochs=1, seed=3)
    assert copied(config).given == config.given == {"epochs": 1, "seed": 3}


@pytest.mark.parametrize("values", [DistributedConfig.to_dict, dataclasses.asdict], ids=["to_dict", "asdict"])
def test_a_config_made_of_all_values_of_another_has_given_those_that_are_no_default(values):
    config = DistributedConfig(epochs=3, data={"presharded": True})
    assert DistributedConfig(**values(config)) == config
    assert DistributedConfig(**values(config)).given == {"epochs": 3, "data": {"presharded": True}}


def test_a_loaders_batch_size_counts_beside_a_replaced_config():
    config = dataclasses.replace(DistributedConfig(epochs=2), epochs=3)
    trainer = Trainer(print, config)
    assert set(trainer.merged.sources) == {"epochs"}
    assert plan_batch(trainer.merged, 1, 16).batch_size == 16


def test_what_a_backends_own_config_implies_leaves_the_rest_as_it_was_given():
    """`sources.py` looks at `config.given` to tell whether a batch size was given."""
    merged = merge(Overrides(), {"backend": "deepspeed", "deepspeed": {"deepspeed_config": {"gradient_clipping": 1.0}}})
    assert merged.config.gradient_clipping == 1.0 and "batch_size" not in merged.config.given


def test_the_strongest_source_wins_and_every_source_is_kept():
    overrides = Overrides(
        file={"epochs": 2, "seed": 5, "ddp": {"bucket_cap_mb": 5, "static_graph": True}},
        flag={"epochs": 9, "ddp": {"bucket_cap_mb": 7}},
    )
    merged = merge(overrides, {"epochs": 4, "batch_size": 8})
    assert (merged.config.epochs, merged.config.seed, merged.config.batch_size) == (9, 5, 8)
    assert merged.config.ddp == {"bucket_cap_mb": 7.0, "static_graph": True}
    assert {name: merged.source(name) for name in ("epochs", "seed", "batch_size", "monitor")} == {
        "epochs": "flag", "seed": "file", "batch_size": "code", "monitor": "default",
    }  # fmt: skip
    assert merged.source("ddp.bucket_cap_mb") == "flag" and merged.source("ddp.static_graph") == "file"


def test_overrides_are_read_with_the_flag_before_the_file_and_groups_merged():
    overrides = Overrides(
        {"seed": 5, "epochs": 2, "ddp": {"static_graph": True}},
        {"epochs": 9, "ddp": {"bucket_cap_mb": 7}},
        script="a.py",
    )
    assert overrides.values() == {"seed": 5, "epochs": 9, "ddp": {"static_graph": True, "bucket_cap_mb": 7}}
    assert [overrides.value(name) for name in ("seed", "epochs", "dtype")] == [5, 9, None]
    assert overrides.value("num_nodes", 1) == 1
    assert overrides.only(["epochs", "dtype"]) == Overrides({"epochs": 2}, {"epochs": 9})
    assert overrides.without(["epochs", "ddp"]) == Overrides({"seed": 5}, {}, script="a.py")


def test_a_value_equal_to_the_default_still_counts_as_set_in_code():
    merged = merge(Overrides(file={"epochs": 5}), DistributedConfig(epochs=1).given)
    assert merged.config.epochs == 1


def test_a_written_config_gives_the_same_settings_with_the_same_strength(tmp_path):
    overrides = Overrides(file={"seed": 5}, flag={"epochs": 9, "ddp": {"bucket_cap_mb": 7.5}, "learning_rate": 1e-5})
    merged = merge(overrides, {"epochs": 4, "batch_size": 8, "mixed_precision": True, "checkpoint_frequency": None})
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(merged, "train.py", ("--width", "3")))
    again = read_config_file(path)
    assert (again.script, again.script_args) == ("train.py", ("--width", "3"))
    # The script's own values stay weaker than the flags of the first run.
    assert merge(again, {"epochs": 4, "batch_size": 8}).config == merged.config
    assert merge(again, {"epochs": 4}).config.batch_size == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epochs: [1\n", ["line 2", "YAML"]),
        ("- 1\n- 2\n", ["mapping"]),
        ("epohcs: 3\n", ["bad.yaml', line 1", "epohcs", "did you mean 'epochs'"]),
        ("seed: 1\nepochs: many\n", ["bad.yaml', line 2: epochs='many'"]),
        ("seed: 1\nddp:\n  static_graph: true\n  bucket_cap_mb: 0\n", ["bad.yaml', line 4: ddp.bucket_cap_mb=0"]),
        ("save_interval: 0\n", ["line 1: checkpoint_every_n_steps=0"]),
        ("seed: 1\nbackend: nccl\n", ["line 2: backend='nccl' is a transport"]),
        ("<<: {epohcs: 1}\n", ["bad.yaml': epohcs is not a setting"]),
        ("!!python/object/apply:os.system ['true']\n", ["YAML"]),
        ("epochs: 3\n\tseed: 4\n", ["line 2", "YAML", "tab"]),
        ("epochs: 3\nseed: 4\nepochs: 5\n", ["'epochs' in line 1 and again in line 3"]),
        ("ddp:\n  bucket_cap_mb: 3\n  bucket_cap_mb: 4\n", ["'bucket_cap_mb' in line 2 and again in line 3"]),
        ("ddp: 3\n", ["ddp=3", "mapping"]),
        ("? [a, b]\n: 3\n", ["YAML"]),
        ("ddp: &x\n  a: *x\n", ["uses the alias *x, but no anchor &x ends before"]),
        ("ddp: {3: 4}\n", ["ddp.3 is not an option"]),
        ("script_args: 3\n", ["script_args=3"]),
        ("a: 1\n---\nb: 2\n", ["YAML", "another document"]),
        (b"\x00\x01\x02", ["YAML"]),
        (b"\xff\xfe\xfd", ["YAML"]),
        (b"epochs: \xe4\n", ["YAML"]),
        (None, ["Is a directory"]),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.mkdir() if text is None else path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        merge(read_config_file(path), {})
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(tmp_path, text):
    (tmp_path / "empty.yaml").write_text(text)
    assert read_config_file(tmp_path / "empty.yaml") == Overrides()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml.*No such file"):
        read_config_file(tmp_path / "nowhere.yaml")


def test_a_rate_written_without_a_dot_is_a_number(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("learning_rate: 1e-3\n")  # YAML 1.1 reads a word here
    assert merge(read_config_file(path), {}).config.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("text", "found"), [("node0:29400", ("node0", 29400)), ("10.0.0.1", ("10.0.0.1", 29500)), ("[::1]:7", ("::1", 7))]
)
def test_an_endpoint_of_torchrun_is_the_address_and_the_port_of_node_0(text, found):
    settings, _ = canonical({"rdzv_endpoint": text})
    assert (settings["master_addr"], settings["master_port"]) == found


@pytest.mark.parametrize("text", ["", "node0:", "node0:x", "a:1:2", "::1", 29400, None])
def test_what_is_not_an_endpoint_is_refused(text):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        canonical({"rdzv_endpoint": text})


@pytest.mark.parametrize("alias", [*ALIASES, "world_size", "no_nccl", "rdzv_endpoint"])
def test_every_alias_is_accepted_and_said_once(alias):
    values = {
        "bucket_cap_mb": 5,
        "bucket_size_mb": 5,
        "gradient_clip_norm": 1.0,
        "save_interval": 10,
        "world_size": 2,
        "zero_stage": 1,
        "deepspeed_config": {},
        "nnodes": 2,
        "rdzv_endpoint": "node0:29400",
    }
    settings, notices = canonical({alias: values.get(alias, True)})
    assert len(notices) == 1 and alias in notices[0]
    DistributedConfig(**settings)


def test_a_sweeps_dict_is_split_into_settings_and_hyperparameters():
    settings, others, warnings = split_sweep({"lr": 0.1, "batch_size": 64, "hidden_size": 128, "batch_sizes": 3})
    assert settings == {"learning_rate": 0.1, "batch_size": 64}
    assert others == {"hidden_size": 128, "batch_sizes": 3}
    assert len(warnings) == 1 and "batch_sizes" in warnings[0]


# a file that the script names

WHERE_THE_FILE_SAYS = "epochs: 5\nseed: 4\nddp: {bucket_cap_mb: 3, static_graph: true}\nsave_interval: 7\n"


def test_a_trainer_reads_a_file_weaker_than_its_arguments_and_a_file_of_a_flag(tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(WHERE_THE_FILE_SAYS)
    overrides = Overrides(file={"seed": 9, "ddp": {"static_graph": False}}, flag={"log_every_n_steps": 2})
    monkeypatch.setattr("distributed.training.setup.handover", lambda: Handover(overrides))

    merged = Trainer(print, tmp_path / "c.yaml", epochs=2, ddp={"bucket_cap_mb": 6}).merged

    names = ("epochs", "seed", "checkpoint_every_n_steps", "log_every_n_steps", "ddp.bucket_cap_mb", "ddp.static_graph")
    assert [merged.source(name) for name in names] == ["code", "file", "file", "flag", "code", "file"]
    assert [merged.config.to_dict()[name] for name in names[:4]] == [2, 9, 7, 2]
    assert merged.config.ddp == {"bucket_cap_mb": 6, "static_graph": False}
    assert merged.notices[0] == "save_interval is read as checkpoint_every_n_steps"


def test_a_trainer_reads_what_a_run_wrote_and_its_flags_are_weak_there(tmp_path):
    merged = merge(
        Overrides(flag={"epochs": 9, "ddp": {"bucket_cap_mb": 7}}), {"seed": 3, "ddp": {"static_graph": True}}
    )
    (tmp_path / "config.yaml").write_text(config_yaml(merged, "train.py"))

    again = Trainer(print, str(tmp_path / "config.yaml"), seed=4).merged

    assert (again.config.epochs, again.config.seed) == (9, 4)
    assert again.config.ddp == {"static_graph": True, "bucket_cap_mb": 7}
    assert {again.source(name) for name in ("epochs", "ddp.static_graph", "ddp.bucket_cap_mb")} == {"file"}


@pytest.mark.parametrize(("config", "words"), [("gone.yaml", "gone.yaml.*No such file"), (3, "int: .* path of a file")])
def test_what_a_trainer_cannot_read_is_named(config, words):
    with pytest.raises(ConfigError, match=words):
        Trainer(print, config)


def test_the_running_script_is_known_as_on_the_command_line_and_a_notebook_or_module_is_none(tmp_path):
    code = (
        "import sys; from distributed.launching.request import running_script as r; print(r().script, *r().script_args)"
    )
    (tmp_path / "job.py").write_text(code)
    for command, seen in (
        (["job.py", "--deep", "--local-rank=0"], "job.py --deep"), (["-m", "job", "a"], "None"), (["-c", code, "a"], "None"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=clean_environment(), check=True, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.stdout.strip() == seen


def test_a_process_of_a_library_has_no_script(monkeypatch):
    """A worker of Ray, for example, runs a file of Ray."""
    main = types.ModuleType("__main__")
    main.__spec__ = None
    monkeypatch.setitem(sys.modules, "__main__", main)
    for file, script in ((pytest.__file__, None), (str(Path.home() / "job.py"), "job.py")):
        main.__file__ = file
        monkeypatch.setattr(sys, "argv", ["job.py", "a"])
        assert running_script().script == script


# the batch equation


def planned(n=2, loader=None, file=None, flag=None, sweep=None, **code):
    return plan_batch(merge(Overrides(file=file or {}, flag=flag or {}), code, sweep=sweep), n, loader)


def numbers(plan):
    return plan.batch_size, plan.gradient_accumulation_steps, plan.global_batch_size


def test_any_two_of_the_three_give_the_third():
    assert numbers(planned()) == (32, 1, 64)
    assert numbers(planned(batch_size=8, gradient_accumulation_steps=3)) == (8, 3, 48)
    assert numbers(planned(batch_size=8, global_batch_size=48)) == (8, 3, 48)
    assert numbers(planned(gradient_accumulation_steps=3, global_batch_size=48)) == (8, 3, 48)
    assert numbers(planned(global_batch_size=48)) == (24, 1, 48)


def test_a_global_batch_that_does_not_divide_is_cut_into_slices_of_almost_the_same_size():
    assert numbers(planned(3, global_batch_size=100, gradient_accumulation_steps=2)) == (17, 2, 100)


def test_three_numbers_that_disagree_are_an_error_with_the_numbers_in_it():
    with pytest.raises(ConfigError, match=r"global_batch_size=100 .*batch_size=8 .*=3 .*=2 = 48"):
        planned(batch_size=8, gradient_accumulation_steps=3, global_batch_size=100)
    with pytest.raises(ConfigError, match=r"global_batch_size=100 is not a multiple.*16"):
        planned(batch_size=8, global_batch_size=100)


def test_a_loaders_batch_size_counts_unless_something_stronger_is_given():
    assert numbers(planned(loader=16)) == (16, 1, 32)
    assert numbers(planned(loader=16, flag={"batch_size": 4})) == (4, 1, 8)
    assert numbers(planned(loader=16, sweep={"batch_size": 4})) == (4, 1, 8)
    assert numbers(planned(loader=16, file={"batch_size": 4})) == (16, 1, 32)
    assert numbers(planned(loader=16, file={"batch_size": 4, "global_batch_size": 24})) == (4, 3, 24)
    assert numbers(planned(loader=16, global_batch_size=10)) == (5, 1, 10)
    assert numbers(planned(loader=16, batch_size=16)) == (16, 1, 32)
    with pytest.raises(ConfigError, match=r"batch_size=8 in code .*batch_size=16"):
        planned(loader=16, batch_size=8)


def test_a_written_config_shows_the_batch_in_effect_and_says_it_to_nobody(tmp_path):
    """A run from it leaves the numbers to the same loader and equation, also with another flag."""
    merged = merge(Overrides(file={"batch_size": 4}), {})
    shown = in_effect(merged, plan_batch(merged, 2, 16), 16)
    text = config_yaml(shown)
    assert "batch_size: 16  # loader" in text and "global_batch_size: 32  # derived" in text
    assert "gradient_accumulation_steps: 1  # default" in text
    (tmp_path / "config.yaml").write_text(text)
    again = read_config_file(tmp_path / "config.yaml")
    assert numbers(plan_batch(merge(again, {}), 2, 16)) == (16, 1, 32)
    assert numbers(plan_batch(merge(again, {"global_batch_size": 50}), 2, 16)) == (25, 1, 50)


def test_all_three_may_be_given_where_the_batch_size_is_the_largest_slice():
    three = {"global_batch_size": 32, "gradient_accumulation_steps": 1}
    assert numbers(plan_batch(merge(Overrides(flag={**three, "batch_size": 11}), {}), 3)) == (11, 1, 32)
    for wrong in (10, 12):
        with pytest.raises(ConfigError, match=f"global_batch_size=32 is not batch_size={wrong} x"):
            plan_batch(merge(Overrides(flag={**three, "batch_size": wrong}), {}), 3)


# processes


def processes(gpus=0, **given):
    plan = plan_processes(DistributedConfig(**given), lambda: gpus)
    return plan.backend, plan.num_nodes, plan.nproc_per_node, plan.device


def test_axes_share_the_processes_and_the_data_axis_counts_the_replicas():
    plan = ProcessPlan(2, 4, "cpu", "pytorch-ddp")
    assert plan.axes == {"data": 8} and plan.data_parallel_size == plan.world_size == 8
    plan = ProcessPlan(2, 4, "cpu", "pytorch-ddp", {"data": 4, "tensor": 2})
    assert list(plan.axes) == ["data", "tensor"] and (plan.data_parallel_size, plan.world_size) == (4, 8)
    assert dataclasses.replace(plan, device="cuda").axes == plan.axes and hash(plan) is not None
    assert ProcessPlan(1, 2, "cpu", "pytorch-ddp", {"tensor": 2}).data_parallel_size == 1
    with pytest.raises(ConfigError, match="data 4 x tensor 3 = 12 processes, but the run has 8"):
        ProcessPlan(2, 4, "cpu", "pytorch-ddp", {"data": 4, "tensor": 3})
    adapter = FakeBackend(
        merge(Overrides(), {}), FakeOptions(), ProcessPlan(1, 4, "cpu", "fake", {"data": 2, "tensor": 2})
    )
    assert plan_batch(adapter.merged, adapter.data_parallel_size).global_batch_size == 2 * adapter.config.batch_size


def test_processes_follow_the_machine_unless_they_are_given():
    assert processes() == ("single", 1, 1, "cpu")
    assert processes(gpus=4) == ("pytorch-ddp", 1, 4, "cuda")
    assert processes(nproc_per_node=2) == ("pytorch-ddp", 1, 2, "cpu")
    assert processes(gpus=4, nproc_per_node=2, device="cpu") == ("pytorch-ddp", 1, 2, "cpu")
    assert processes(gpus=4, num_gpus=0) == ("single", 1, 1, "cpu")
    assert processes(gpus=4, num_gpus=8, num_nodes=2) == ("pytorch-ddp", 2, 4, "cuda")
    assert processes(gpus=4, backend="single", nproc_per_node=1) == ("single", 1, 1, "cuda")


@pytest.mark.parametrize(
    ("gpus", "given", "kind", "words"),
    [
        (
            8,
            {"num_gpus": 6, "num_nodes": 2, "gpus_per_node": 4},
            ConfigError,
            "num_gpus=6 is not num_nodes=2 x gpus_per_node=4: set num_gpus=8",
        ),
        (
            0,
            {"num_gpus": 6, "num_nodes": 2, "gpus_per_node": 4},
            ConfigError,
            "num_gpus=8",
        ),  # arithmetic before resources
        (8, {"num_gpus": 3, "num_nodes": 2}, ConfigError, "num_gpus=3"),
        (8, {"gpus_per_node": 2, "nproc_per_node": 4}, ConfigError, "nproc_per_node=4"),
        (8, {"num_gpus": 2, "device": "cpu"}, ConfigError, "device='cpu'"),
        (0, {"num_gpus": 4}, ResourceError, "--num-gpus 0 --nproc-per-node 4"),
        (0, {"device": "cuda"}, ResourceError, "no GPU"),
        (2, {"num_gpus": 4}, ResourceError, "shows 2 GPUs"),
        (0, {"backend": "single", "nproc_per_node": 2}, ConfigError, "pytorch-ddp"),
    ],
)
def test_processes_that_do_not_fit_are_an_error_with_the_fix(gpus, given, kind, words):
    with pytest.raises(kind) as caught:
        processes(gpus=gpus, **given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"device": "cuda"},
        {"device": "cuda", "nproc_per_node": 1},
        {"device": "cuda", "nproc_per_node": 3},
        {"num_gpus": 4},
        {"num_gpus": 4, "nproc_per_node": 4},
        {"num_gpus": 4, "num_nodes": 2, "device": "cuda"},
        {"gpus_per_node": 2, "num_nodes": 2},
        {"num_gpus": 4, "gpus_per_node": 2, "num_nodes": 2},
    ],
)
@pytest.mark.parametrize("gpus", [0, 1])
def test_what_the_error_advises_where_gpus_are_missing_works(gpus, given):
    config = DistributedConfig(**given)
    if gpus == 1 and given in ({"device": "cuda"}, {"device": "cuda", "nproc_per_node": 1}):
        assert processes(gpus, **given)[3] == "cuda"
        return
    with pytest.raises(ResourceError) as caught:
        processes(gpus, **given)
    advised = re.findall(r"--([\w-]+) (\w+)", str(caught.value))
    advised_settings = {name.replace("-", "_"): int(value) if value.isdecimal() else value for name, value in advised}
    assert advised_settings.items() - given.items(), "it advises what was asked for already"
    wanted = config.nproc_per_node or (config.num_gpus or 0) // config.num_nodes or config.gpus_per_node or 1
    assert processes(gpus, **given | advised_settings)[1:] == (config.num_nodes, wanted, "cpu")


@pytest.fixture
def on_cpus(monkeypatch):
    """Let a backend train on CPUs only."""
    monkeypatch.setitem(REGISTRY, "fsdp", dataclasses.replace(REGISTRY["fsdp"], cpus_only=True))


@pytest.mark.parametrize("setting", [{"device": "cuda"}, {"num_gpus": 2}, {"gpus_per_node": 2}])
def test_an_engine_of_cpus_refuses_gpus_in_one_line_and_without_counting_them(setting, on_cpus):
    ((name, value),) = setting.items()
    line = f"{name}={value!r} does not work with backend='fsdp': it trains on CPUs only: drop it, or choose another backend"
    with pytest.raises(ConfigError) as caught:
        plan_processes(DistributedConfig(backend="fsdp", **setting), lambda: pytest.fail("the GPUs were counted"))
    assert str(caught.value) == line


def test_an_engine_of_cpus_trains_on_them_where_there_are_gpus(on_cpus):
    assert processes(gpus=4, backend="fsdp", nproc_per_node=8) == ("fsdp", 1, 8, "cpu")
    assert processes(gpus=4, backend="fsdp", num_gpus=0) == ("fsdp", 1, 1, "cpu")
    refused = capabilities_of(REGISTRY["fsdp"])
    assert [refused.accepts(name) for name in ("device=cuda", "device=cpu", "num_gpus")] == [False, True, False]


# the registry


def words_of_backends(path, words):
    """Where code (not a docstring) says one of `words`: a text, an attribute or an argument of that name."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    pinned = {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_backend"
    }
    in_text = re.compile(rf"(?<![\w-])({'|'.join(words - {'single'})})(?![\w-])")  # a single file is no backend
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | pinned:
            if node.value in words or in_text.search(node.value):
                yield f"{path.name}:{node.lineno} {node.value!r}"
        elif (isinstance(node, ast.Attribute) and node.attr in words) or (
            isinstance(node, ast.keyword) and node.arg in words
        ):
            yield f"{path.name}: {ast.unparse(node)}"


def test_no_file_outside_backends_names_a_backend():
    home = Path(distributed.__file__).parent
    words = {word for entry in REGISTRY.values() for word in (entry.name, entry.group)}
    # Ray is a scheduler too, to which jobs are handed; an operator of Kubernetes starts clusters of it.
    submit = {
        *(home / "launcher" / "submit" / name for name in ("ray_jobs.py", "operators.py")),
        home / "cli" / "submit_ray.py",
    }
    shown = home / "cli" / "examples.py"  # lines that users type, and no code
    named = {home / "backends", home / "tuning" / "ray", home / "config" / "registry.py", shown} | submit
    elsewhere = [path for path in home.rglob("*.py") if not named & {path, *path.parents}]
    assert len(elsewhere) > 30
    found = [each for path in elsewhere for each in words_of_backends(path, words)]
    assert [each for each in found if "distributed.tuning.ray.sweep" not in each] == []


def test_a_new_backend_is_a_file_and_an_entry():
    code = """
import sys, types, dataclasses
from distributed.config.fields import setting
@dataclasses.dataclass(frozen=True)
class Options:
    speed: int = setting(1, "how fast", minimum=1)
module = sys.modules["toy_backend"] = types.ModuleType("toy_backend")
module.Toy = type("Toy", (), {"Options": Options})
from distributed.config.registry import REGISTRY, BackendEntry
REGISTRY["toy"] = BackendEntry("toy", "toy_backend", "Toy", "toy", (), (), "", "a toy", aliases={"toy_speed": "speed"})
from distributed.cli.__main__ import run
from distributed.config.settings import DistributedConfig, canonical
from distributed.config.merging import Overrides, merge
settings, said = canonical({"toy_speed": 3, "backend": "toy"})
print(said, merge(Overrides(), settings).config.options("toy"))
try: DistributedConfig(toy={"sped": 3})
except Exception as error: print(error)
run(["train", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(
        "['toy_speed is read as toy.speed'] Options(speed=3)\ntoy.sped is not an option (did you mean 'speed'?)"
    )
    assert f"{', '.join([*REGISTRY, 'toy'])} (default:" in " ".join(done.stdout.split())


# what an import costs


def test_importing_the_package_and_the_config_loads_no_framework():
    code = (
        "import sys, distributed; distributed.DistributedConfig(nproc_per_node=2); print(*sys.modules);"
        " distributed.comm.all_reduce, distributed.gradient_checkpointing.checkpoint_scope"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert not {"torch", "numpy", "yaml", "rich", "typer", "tensorflow", "pydantic"} & set(loaded)


def test_every_backend_file_imports_without_its_engine():
    code = (
        "import sys, pkgutil, importlib, distributed.backends as b\n"
        "for m in pkgutil.iter_modules(b.__path__):\n"
        "    if not m.ispkg: importlib.import_module('distributed.backends.' + m.name)\n"
        "print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    assert "distributed.backends.ddp" in loaded and "torch" not in loaded


def test_a_part_of_one_name_stands_for_it():
    assert nearest("ddp", REGISTRY) == " (did you mean 'pytorch-ddp'?)"
    assert nearest("d", REGISTRY) == nearest("zzz", REGISTRY) == nearest("or", REGISTRY) == ""
