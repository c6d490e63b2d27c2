"""A setting that has no effect where a run takes place is named at its start; a contradiction is an error."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import distributed.training.setup
from distributed import PyTorchDDPTrainer, Trainer
from distributed.backends import backend_class, make_backend
from distributed.backends._torch.world import ProcessGroup, leave_group
from distributed.backends.capabilities import capabilities_of, settings_for_all
from distributed.backends.effects import EFFECTS, Situation, lines_of, needs_of, without_effect
from distributed.cli.__main__ import run
from distributed.config.fields import rules
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.registry import REGISTRY, option_class
from distributed.config.settings import DistributedConfig, canonical
from distributed.errors import ConfigError, DistributedError
from distributed.launching.request import LaunchRequest
from distributed.testing.faults import refused_value
from distributed.training.files import _Taken
from tests.conftest import needs_backend

ROOT = Path(__file__).resolve().parents[2]
DATA = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12) % 2)

# ------------------------------------------------------------------ every setting x backend x processes x launcher

# The settings that have an effect in every run of a backend that takes them. The test fails for a new setting until it stands here
# or has a need in `distributed.backends.effects`.
ALWAYS = """
backend num_gpus gpus_per_node nproc_per_node device nan_policy seed deterministic shuffle epochs max_steps batch_size
global_batch_size gradient_accumulation_steps init_from dtype validate_every_n_steps validate_every_s validate_at_start max_validation_batches
early_stopping_patience monitor monitor_mode optimizer learning_rate weight_decay layer_rates scheduler lr_scaling
warmup_steps gradient_clipping mixed_precision activation_checkpointing compile checkpoint_dir resume_from_checkpoint
checkpoint_at_start checkpoint_frequency checkpoint_every_n_steps checkpoint_every_s checkpoint_trainable_only keep_latest_k keep_best
checkpoint_async max_failed_saves log_every_n_steps verbose loggers mlflow_tracking tensorboard profile data.presharded
data.shard_streams data.remove_unused_columns
"""
# The options of backends that have an effect wherever the backend is chosen.
OPTIONS_ALWAYS = """
ddp.find_unused_parameters ddp.bucket_cap_mb ddp.static_graph ddp.comm_hook ddp.powersgd_rank ddp.powersgd_start_step ddp.topk_ratio
ddp.hierarchical_group_size fsdp.wrap_classes fsdp.min_num_params fsdp.reshard_after_forward fsdp.cpu_offload fsdp.reduce_dtype
ray.engine ray.report_to_tune deepspeed.zero_stage deepspeed.offload_optimizer deepspeed.offload_param deepspeed.cpu_adam
deepspeed.native_checkpoint deepspeed.deepspeed_config horovod.keras_backend tensorflow.strategy tensorflow.num_devices
"""
# Given alone, on CPUs, these have no effect anywhere: what they belong to is off.
OFF = {
    "momentum", "scheduler_steps", "min_learning_rate", "scheduler_power", "scheduler_decay_ratio",
    "scaler_init_scale", "scaler_growth_interval", "scheduler_interval", "mlflow_checkpoint", "profile_wait",
    "profile_warmup", "profile_active", "tensorboard_histograms", "warmup_start", "elastic_interval_s", "min_nproc_per_node",
}  # fmt: skip
LAUNCHERS_OWN = {"monitor_interval", "max_restarts", "restart_on_exception", "hang_timeout", "hang_timeout_slow"}
RESTARTED = {
    "auto_micro_batch",
    "snapshot_every_n_steps",
}  # work wherever our launcher starts the workers, whenever the setting becomes known
# Workers of one node meet in a file: nothing looks for them at an address, and no port is opened.
ONE_NODE = {"master_addr", "master_port", "node_rank", "node_timeout", "min_nodes"}
ONE_PROCESS = {"communication_backend", "start_timeout"} | ONE_NODE
# (who started the processes, how many nodes, how many processes of each) -> what has no effect there
PLACES = {
    ("nobody", 1, 1): OFF | LAUNCHERS_OWN | RESTARTED | ONE_PROCESS | {"timeout_s"},
    ("ours", 1, 1): OFF | ONE_PROCESS,
    ("ours, before the script", 1, 1): OFF | ONE_PROCESS | LAUNCHERS_OWN | {"timeout_s"},
    ("another", 1, 1): OFF | ONE_PROCESS | LAUNCHERS_OWN | RESTARTED | {"timeout_s"},
    ("ours", 1, 2): OFF | ONE_NODE,
    ("ours, before the script", 1, 2): OFF | ONE_NODE | LAUNCHERS_OWN,
    ("another", 1, 2): OFF | ONE_NODE | LAUNCHERS_OWN | RESTARTED,
    ("ours", 2, 2): OFF,
    ("ours, before the script", 2, 2): OFF | ONE_NODE | LAUNCHERS_OWN,
    ("another", 2, 2): OFF | ONE_NODE | LAUNCHERS_OWN | RESTARTED,
}
# Where a backend differs: (backend, setting, who started the processes or None for anybody) -> whether it has an effect
DIFFERENT = {
    ("ray", "start_timeout", "ours"): True,
    ("ray", "start_timeout", "ours, before the script"): False,
    ("ray", "start_timeout", "another"): False,
    ("ray", "start_timeout", "nobody"): False,
    ("ray", "address", "ours"): True,
    ("ray", "address", "ours, before the script"): False,
    ("ray", "address", "another"): False,
    ("ray", "address", "nobody"): False,
    ("ray", "wait", "ours"): True,
    ("ray", "wait", "ours, before the script"): False,
    ("ray", "wait", "another"): False,
    ("ray", "wait", "nobody"): False,
}
CLUSTER = {"address": "127.0.0.1:1"}  # without one, Ray has one node
BESIDE = {"warmup_start": {"warmup_steps": 0}, "wait": CLUSTER, "min_nproc_per_node": {"nproc_per_node": 1}}
VALUES = {
    "warmup_start": 0.5,
    "tensorboard_histograms": True,
    "num_gpus": 0,
    "gpus_per_node": 0,
    "device": "cpu",
    "backend": None,
    "min_nodes": 1,
    "min_nproc_per_node": 1,
}


def request_with(settings: dict[str, Any]) -> LaunchRequest:
    fields = {name: value for name, value in settings.items() if name in LaunchRequest.__dataclass_fields__}
    return LaunchRequest("run", **fields, launcher_options={name: settings.get(name) for name in ("address", "wait")})


def situation(backend: str, settings: dict[str, Any], who: str, nodes: int, processes: int, **more: Any) -> Situation:
    given, _ = canonical({"backend": backend, **settings})
    adapter = make_backend(merge(Overrides(), given), ProcessPlan(nodes, processes, "cpu", backend))
    request = {"ours": request_with(given), "ours, before the script": request_with({})}.get(who)
    return Situation(adapter, request, who != "nobody", **more)


def one_setting(backend: str, name: str, nodes: int) -> dict[str, Any]:
    """The setting with a value that is not the default, where the number of nodes leaves one."""
    cluster = CLUSTER if backend == "ray" and nodes > 1 and name != "address" else {}
    values = {**VALUES, "num_nodes": nodes, "node_rank": nodes - 1}
    return {
        "num_nodes": nodes,
        **cluster,
        **BESIDE.get(name, {}),
        name: values[name] if name in values else refused_value(name),
    }


CASES = [
    pytest.param(name, (who, nodes, each), id=f"{name}-{who}-{nodes}x{each}")
    for name, entry in REGISTRY.items()
    for who, nodes, each in PLACES
    if (nodes * each == 1 or not entry.single_process) and (nodes == 1 or capabilities_of(entry).accepts("num_nodes"))
]


@pytest.mark.parametrize(("backend", "place"), CASES)
def test_every_setting_has_an_effect_is_refused_or_is_named(backend, place, monkeypatch):
    needs_backend(backend)
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
    who, nodes, processes = place
    wrong = {}
    for name in [each for each in settings_for_all() if each != "backend"]:
        try:
            found = without_effect(
                situation(backend, one_setting(backend, name, nodes), who, nodes, processes, has_schedule=False)
            )
        except ConfigError as error:
            capabilities = capabilities_of(REGISTRY[backend])
            is_refused = [key for key in (*capabilities.refuses, *capabilities.conditions) if key.startswith(name)]
            if not is_refused and name != "num_nodes":
                wrong[name] = str(error)
            continue
        expected = name not in PLACES[place]
        for key in ((backend, name, None), (backend, name, who)):
            expected = DIFFERENT.get(key, expected)
        if (name not in found) != expected:
            wrong[name] = found.get(name, "has an effect")
    assert wrong == {}


def test_every_setting_has_an_entry_and_every_option_was_thought_of():
    assert set(EFFECTS) == set(settings_for_all())
    assert {name for name, needs in EFFECTS.items() if not needs} == set(ALWAYS.split())
    options = {f"{entry.group}.{name}" for entry in REGISTRY.values() for name in rules(option_class(entry.group))}
    with_needs = {name for each in REGISTRY for name in backend_class(each).needs if "." in name}
    assert options == with_needs | set(OPTIONS_ALWAYS.split()) and not with_needs & set(OPTIONS_ALWAYS.split())
    for each in REGISTRY:
        assert set(backend_class(each).needs) <= set(EFFECTS) | options


def test_the_needs_of_a_setting_are_in_words():
    needs = [
        need
        for each in REGISTRY
        for name in (*EFFECTS, *backend_class(each).needs)
        for need in needs_of(backend_class(each), name)
    ]
    assert needs and all(need.what for need in needs)


@pytest.mark.parametrize(
    ("settings", "more", "is_there"),
    [
        ({"scaler_init_scale": 8.0, "mixed_precision": "fp16"}, {}, True),
        ({"scaler_init_scale": 8.0, "mixed_precision": True}, {}, False),  # bf16 on CPUs
        ({"scaler_growth_interval": 8, "mixed_precision": "bf16"}, {}, False),
        ({"mlflow_checkpoint": False, "mlflow_tracking": True}, {}, True),
        ({"mlflow_checkpoint": False, "mlflow_experiment": "x"}, {}, True),
        ({"mlflow_experiment": "x", "mlflow_tracking": False}, {}, False),
        ({"mlflow_register_model": "x", "mlflow_tracking": False}, {}, False),
        ({"tensorboard_dir": "x"}, {}, True),
        ({"tensorboard_dir": "x", "tensorboard": False}, {}, False),
        ({"scheduler_interval": "step"}, {"has_schedule": True}, True),
        ({"scheduler_interval": "step"}, {"has_schedule": None}, True),  # the script has not run yet
        ({"scheduler_interval": "step"}, {"has_schedule": False}, False),
        ({"profile_wait": 3, "profile": True}, {}, True),
        ({"warmup_start": 0.1, "warmup_steps": 3}, {}, True),
        ({"ddp": {"bucket_cap_mb": 3}}, {}, True),
        ({"fsdp": {"cpu_offload": True}}, {}, False),
    ],
)
def test_what_a_setting_belongs_to_decides(settings, more, is_there):
    name = next(iter(settings))
    name = f"{name}.{next(iter(settings[name]))}" if isinstance(settings[name], dict) else name
    found = without_effect(situation("pytorch-ddp", settings, "ours", 1, 2, **more))
    assert (name not in found) == is_there, found


def test_options_of_another_engine_count_where_that_engine_does_the_step():
    needs_backend("ray")
    settings = {"ddp": {"bucket_cap_mb": 3}, "fsdp": {"cpu_offload": True}}
    assert set(without_effect(situation("ray", settings, "ours", 1, 2))) == {"fsdp.cpu_offload"}
    settings["ray"] = {"engine": "fsdp"}
    assert set(without_effect(situation("ray", settings, "ours", 1, 2))) == {"ddp.bucket_cap_mb"}


def test_what_fit_leaves_to_itself_is_no_flag_that_is_missing():
    backend = situation("pytorch-ddp", {"master_port": 9999, "max_restarts": 3}, "nobody", 2, 2).backend
    request = LaunchRequest("run", payload="job", max_restarts=3)
    assert without_effect(Situation(backend, request)) == {"master_port": "fit chooses it"}


def test_a_limit_of_slow_work_needs_the_watch_for_hangs():
    slow = {"hang_timeout_slow": 30.0}
    assert without_effect(situation("pytorch-ddp", slow, "ours", 1, 2)) == {}
    off = without_effect(situation("pytorch-ddp", {**slow, "hang_timeout": 0}, "ours", 1, 2))
    assert off == {"hang_timeout_slow": "hang_timeout is 0"}


def test_workers_on_a_cluster_that_ray_joined_meet_at_the_port():
    needs_backend("ray")
    settings = {"master_port": 29511}
    assert without_effect(situation("ray", settings, "ours", 1, 2)) == {"master_port": "no cluster is joined"}
    assert without_effect(situation("ray", {**settings, "address": "10.0.0.1:6379"}, "ours", 1, 2)) == {}


def test_an_elastic_run_on_its_last_node_still_has_an_address_for_others():
    address = {"master_addr": "node0", "master_port": 29511}
    for nodes, missing in (("1:3", {}), (1, dict.fromkeys(address, "one node"))):
        found = without_effect(situation("pytorch-ddp", {**address, "num_nodes": nodes}, "ours", 1, 2))
        assert {name: found[name] for name in address if name in found} == missing


def test_what_one_process_of_horovod_cannot_use_is_named():
    needs_backend("horovod")
    options = {"horovod": {"compression": "fp16", "timeline": "t.json"}}
    found = without_effect(situation("horovod", options, "ours", 1, 1))
    assert found == {"horovod.compression": "one process", "horovod.timeline": "one process"}
    assert without_effect(situation("horovod", options, "ours", 1, 2)) == {}


def test_horovodrun_has_its_own_limit_for_the_start(monkeypatch):
    needs_backend("horovod")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    found = without_effect(situation("horovod", {"start_timeout": 9}, "another", 1, 2))
    assert found == {"start_timeout": "horovodrun and mpirun use their own limits"}
    assert without_effect(situation("horovod", {"start_timeout": 9}, "ours", 1, 2)) == {}


def test_a_compilation_is_waited_for_in_one_process_too():
    needs_backend("deepspeed")
    options = {"cpu_adam": True, "offload_optimizer": True}
    settings = {"start_timeout": 9, "deepspeed": options}
    assert without_effect(situation("deepspeed", settings, "nobody", 1, 1)) == {}


def test_the_line_groups_settings_by_their_reason():
    assert lines_of({}) == []
    assert lines_of({"a": "one process", "b": "MLflow is off", "c": "one process"}) == [
        "no effect here: a, c (one process); b (MLflow is off)"
    ]


# ------------------------------------------------------------------ the line of a run


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A process that has trained nothing yet, and leaves the group that it joined."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"first": None, "count": 0, "num_named": Counter()}.items():
        monkeypatch.setattr(_Taken, name, value)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    yield tmp_path
    leave_group()


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def said(capsys: Any) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]


def test_a_fit_in_this_process_names_what_has_no_effect_once(place, capsys):
    """The settings that the issue of a silent start was about, all in one line. 002's sample of fp16 on a CPU is among them."""
    PyTorchDDPTrainer(
        net(), mixed_precision=True, scaler_init_scale=2**16, scaler_growth_interval=2000, mlflow_checkpoint=True,
        scheduler_interval="epoch", max_restarts=3, restart_on_exception=True, monitor_interval=1.0, timeout_s=60,
        master_addr="localhost", communication_backend="gloo", batch_size=4, device="cpu", nproc_per_node=1,
        fsdp={"cpu_offload": True},
    ).fit(DATA)  # fmt: skip
    assert said(capsys) == [
        "no effect here: scaler_init_scale, scaler_growth_interval (mixed_precision is bf16); mlflow_checkpoint (MLflow is off);"
        " scheduler_interval (no schedule counts updates or epochs); max_restarts, restart_on_exception, monitor_interval,"
        " timeout_s (fit trains in this process); master_addr (one node); communication_backend (one process);"
        " fsdp.cpu_offload (backend is pytorch-ddp)"
    ]


def test_nothing_is_said_where_everything_has_an_effect(place, capsys):
    Trainer(
        net(), scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), device="cpu",
        scheduler_interval="epoch", batch_size=4, epochs=1,
    ).fit(DATA)  # fmt: skip
    assert said(capsys) == []


def test_a_plateau_is_paced_by_nothing(place, capsys):
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    Trainer(net(), scheduler=plateau, scheduler_interval="step", monitor="loss", batch_size=4, device="cpu").fit(DATA)
    assert said(capsys) == ["no effect here: scheduler_interval (no schedule counts updates or epochs)"]


SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
data = TensorDataset(torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))
Trainer(torch.nn.Linear(2, 2), max_restarts=5, monitor_interval=0.5, timeout_s=9, batch_size=4).fit(data)
"""


def test_under_our_launcher_the_line_comes_once_and_names_what_the_script_said_too_late(run_cli, tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    done = run_cli(
        ["train", "--script", "job.py", "--nproc-per-node", "2", "--max-restarts", "5", "--set", "ddp.bucket_cap_mb=1",
         "--scaler-init-scale", "4"],
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.output
    assert [line for line in done.stdout.splitlines() if "no effect" in line] == [
        "no effect here: monitor_interval (the launcher started without it: give it by flag or --config);"
        " scaler_init_scale (mixed_precision is no)"
    ]


def test_under_another_launcher_what_ours_would_do_is_named(run_python, tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    done = run_python(["job.py"], cwd=tmp_path, env=places)
    assert done.returncode == 0, done.output
    assert [line for line in done.stdout.splitlines() if "no effect" in line] == [
        "no effect here: max_restarts, monitor_interval, timeout_s (another launcher started the processes)"
    ]


def test_a_dry_run_names_them_too(place, capsys):
    (place / "job.py").touch()
    assert (
        run(
            [
                "train",
                "--script",
                "job.py",
                "--device",
                "cpu",
                "--master-addr",
                "here",
                "--max-restarts",
                "2",
                "--dry-run",
            ]
        )
        == 0
    )
    assert said(capsys) == ["no effect here unless the script changes that: master_addr (one node)"]


# ------------------------------------------------------------------ contradictions


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ({"profile": True, "profile_wait": 3}, {"profile": False}),
        ({"tensorboard": True, "tensorboard_histograms": True}, {"tensorboard": False}),
        ({"warmup_steps": 3, "warmup_start": 0.1}, {"warmup_steps": 0}),
    ],
)
def test_what_a_flag_switches_off_takes_its_details_with_it(file, flags, monkeypatch):
    """In one place the two contradict each other; a flag may overrule a file that serves other runs too."""
    name = next(name for name in file if name not in flags)
    with pytest.raises(ConfigError, match=name):
        Trainer(print, **{name: file[name]}, **flags)
    with pytest.raises(ConfigError, match=name):
        Trainer(print, **{name: file[name]})

    monkeypatch.setattr(
        distributed.training.setup, "handover", lambda: distributed.launching.request.Handover(Overrides(file, flags))
    )
    trainer = Trainer(print, device="cpu")
    assert set(without_effect(Situation(trainer.backend, None, False))) == {name}


def test_another_number_of_nodes_in_the_script_than_the_launchers_is_an_error(monkeypatch):
    monkeypatch.setattr(distributed.training.setup, "launched_by", lambda: LaunchRequest("run", num_nodes=1))
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        ConfigError,
        match=r"num_nodes=2 in the script, but this run was started with num_nodes=1: start with --num-nodes 2",
    ):
        Trainer(print, num_nodes=2, device="cpu")
    assert Trainer(print, num_nodes=1, device="cpu").plan.world_size == 2


def test_under_another_launcher_the_number_of_nodes_is_named(monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2}.items():  # as pods have it, which say nothing of nodes
        monkeypatch.setenv(name, str(value))
    trainer = Trainer(print, num_nodes=2, device="cpu")
    assert without_effect(Situation(trainer.backend, None)) == {"num_nodes": "another launcher started 1"}


def test_a_transport_that_the_script_did_not_join_with_is_an_error(place):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = DistributedConfig(communication_backend="nccl")
    with pytest.raises(ConfigError, match="communication_backend='nccl' is not the 'gloo' that the script joined with"):
        ProcessGroup(ProcessPlan(1, 1, "cpu", "pytorch-ddp"), config, print)


# ------------------------------------------------------------------ what the documents show

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TRAINERS = {"Trainer", *(name for name in dir(distributed) if name.endswith("Trainer"))}


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (page.name, code)
        for page in PAGES
        for code in re.findall(rf"^```{language}\b.*?\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]


def literal(call: ast.Call) -> dict[str, Any]:
    found = {}
    for keyword in call.keywords:
        try:
            found[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return found


CALLS = [
    (
        f"{page}: {ast.unparse(node.func)}",
        getattr(distributed, ast.unparse(node.func)),
        literal(node),
        "scheduler" in ast.unparse(node),
    )
    for page, code in blocks("python")
    for node in ast.walk(ast.parse(code))
    if isinstance(node, ast.Call) and ast.unparse(node.func) in TRAINERS
]


def test_no_sample_in_python_shows_a_setting_without_effect():
    seen, wrong = 0, []
    for where, kind, settings, has_schedule in CALLS:
        try:
            trainer = kind(print, **settings)
        except DistributedError:  # a library or a GPU that is not here, or a trial of Ray Tune
            continue
        seen += 1
        config = trainer.merged.config.to_dict()
        request = request_with({name: config[name] for name in LaunchRequest.__dataclass_fields__ if name in config})
        place = Situation(trainer.backend, request if trainer.setup.is_fit_in_workers else None, False, has_schedule)
        if found := without_effect(place):
            wrong.append((where, found))
    assert wrong == [] and seen > 10


def test_no_command_shows_a_setting_without_effect(place, capsys, monkeypatch):
    (place / "examples").symlink_to(ROOT / "examples")
    (place / "train.py").touch()
    monkeypatch.setattr("distributed.config.plan.visible_gpus", lambda: 0)
    lines = [
        line
        for _, code in blocks("bash")
        for line in code.splitlines()
        if re.match(r"python -m distributed.cli train .*--script", line)
    ]
    seen, wrong = 0, []
    for line in lines:
        words = shlex.split(line)[3:]
        words.insert(1, "--dry-run")
        if not Path(words[words.index("--script") + 1]).exists():
            Path(words[words.index("--script") + 1]).touch()
        try:
            run(words)
        except DistributedError:  # a library that is not here, a file that the page makes
            continue
        seen += 1
        wrong += [(line, text) for text in said(capsys)]
    assert wrong == [] and seen > 10
