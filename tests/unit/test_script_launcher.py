"""The launcher for scripts without a Trainer: its flags, its configuration and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import distributed
from distributed import ConfigError, DistributedLauncher, LaunchConfig, launch_distributed_training
from distributed.config import cores
from distributed.config.merging import Overrides
from distributed.config.plan import ProcessPlan, starting_line
from distributed.launcher import scripts as script_launcher
from distributed.launcher.scripts import parse
from distributed.launching import request
from distributed.launching.request import Handover
from distributed.launching.variables import crowding, thread_count


def test_flags_are_ours_on_either_side_of_the_script_and_the_rest_is_the_scripts():
    config, script, rest = parse(
        [
            "--nnodes",
            "2",
            "train.py",
            "--nproc_per_node=8",
            "--master-addr=host",
            "--epochs",
            "3",
            "-v",
            "--backend=gloo",
        ]
    )
    assert (script, rest) == ("train.py", ["--epochs", "3", "-v"])
    assert config == LaunchConfig(nproc_per_node=8, nnodes=2, master_addr="host", backend="gloo")
    assert config.settings() == {
        "nproc_per_node": 8, "num_nodes": 2, "master_addr": "host", "communication_backend": "gloo", "device": "cpu",
    }  # fmt: skip


def test_what_follows_two_dashes_is_the_scripts_own():
    assert parse(["train.py", "--nnodes=1", "--", "--backend", "x"])[2] == ["--backend", "x"]
    assert parse(["--", "train.py", "--nnodes=1"]) == (LaunchConfig(), "train.py", ["--nnodes=1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc_per_nod=2", "train.py"], "did you mean 'nproc_per_node'"),
        (["train.py", "--nproc_per_node"], "needs a value"),
        (["train.py", "--nproc_per_node=two"], "is not a number"),
        (["train.py", "--nproc_per_node=0"], "nproc_per_node=0"),
        (["train.py", "--backend=ddp"], "communication_backend='ddp'"),
        (["--nnodes=1"], "no script to run"),
    ],
)
def test_a_wrong_command_line_is_an_error_with_the_fix(arguments, message):
    with pytest.raises(ConfigError) as error:
        parse(arguments)
    assert message in str(error.value)


def test_wrong_calls_are_refused_before_anything_starts(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'nnodes'"):
        launch_distributed_training("train.py", nnode=2)
    with pytest.raises(ConfigError, match="does not exist"):
        DistributedLauncher(LaunchConfig(device="cpu")).launch("no_such_script.py")
    with pytest.raises(ConfigError, match=r"script argument \[100\] is a list: pass text, '\[100\]'"):
        launch_distributed_training("train.py", "--epochs", [100])
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="unset RANK and WORLD_SIZE"):
        DistributedLauncher().launch(__file__)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigError, match="already is rank 1 of 2"):
        DistributedLauncher().launch(__file__)


@pytest.fixture
def requests(monkeypatch):
    """What is launched, which does not start."""
    found = []
    monkeypatch.setattr(script_launcher, "start_launcher", lambda request: found.append(request) or 0)
    return found


def test_numbers_and_paths_among_the_scripts_arguments_are_taken_as_their_text(requests):
    launch_distributed_training(
        Path(__file__), "--batch_size", 32, "--lr", 1e-3, np.int64(7), Path("a") / "b", device="cpu"
    )

    assert requests[0].script == __file__
    assert requests[0].script_args == ("--batch_size", "32", "--lr", "0.001", "7", "a/b")
    with pytest.raises(ConfigError, match="script argument True is a bool"):
        launch_distributed_training(__file__, True)


def test_a_launch_names_a_stale_rank_0_and_leaves_the_callers_environment(requests, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    DistributedLauncher(LaunchConfig(nproc_per_node=2, device="cpu")).launch(__file__)

    assert requests[0].nproc_per_node == 2
    assert requests[0].started_lines[0].startswith("RANK=0 and WORLD_SIZE=4 in the environment are ignored")
    assert os.environ["RANK"] == "0"


def test_every_exported_name_is_there():
    assert {name for name in distributed.__all__ if not hasattr(distributed, name)} == set()


def test_more_than_four_processes_of_a_core_are_warned_of(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert crowding(8) is None
    assert crowding(200).startswith("200 processes share 2 cores, more than 4 on each: they start slowly")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_the_cpu_limit_of_a_container_counts(monkeypatch, tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(cores, "_GROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.num_cores() == expected and thread_count(2) == max(1, expected // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cores.cores_of_rank() == max(1, expected // 2)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert cores.cores_of_rank() == expected


def test_the_start_names_the_backend_that_was_chosen_and_what_takes_long():
    assert starting_line(ProcessPlan(1, 2, "cpu", "pytorch-ddp")) == "starting 2 workers (pytorch-ddp, cpu)"
    assert starting_line(ProcessPlan(1, 1, "cpu", "single"), is_chosen=False) == "starting 1 worker (cpu)"
    assert starting_line(ProcessPlan(1, 8, "cpu", "ray"), is_elastic=True).startswith(
        "starting up to 8 workers (ray, cpu)"
    )
    assert (
        starting_line(ProcessPlan(1, 2, "cpu", "pytorch-ddp"), is_elastic=True)
        == "starting 2 workers (pytorch-ddp, cpu)"
    )
    for name, word in {"ray": "Ray", "deepspeed": "DeepSpeed", "tensorflow": "TensorFlow"}.items():
        line = starting_line(ProcessPlan(1, 2, "cuda", name))
        assert line.startswith(f"starting 2 workers ({name}, cuda): ") and word in line and len(line) < 90


def test_dir_shows_the_public_names_alone():
    assert dir(distributed) == sorted(distributed.__all__)
    assert [name for name in dir(distributed) if name.startswith("_")] == []
    assert distributed.__version__ and distributed.comm.all_reduce is distributed.all_reduce  # there, and not shown


@pytest.mark.parametrize(("backend", "unused"), [("fsdp", ["backend=fsdp", "epochs"]), ("pytorch-ddp", ["epochs"])])
def test_a_script_without_a_trainer_is_not_sharded(monkeypatch, backend, unused):
    monkeypatch.setattr(request, "_from_launcher", type(request._from_launcher)())
    request.set_this_worker(Handover(Overrides(flag={"backend": backend, "epochs": 2, "timeout_s": 5.0})))
    assert request.unused_settings() == unused
