"""What `train` does beside RANK and WORLD_SIZE that somebody exported, in a pod, and with --world-size and --rank. Nothing is started."""

from __future__ import annotations

import os
import socket

import pytest

from distributed.cli.__main__ import run
from distributed.config.merging import merge
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launcher import start

TRAIN = ("train", "--script", "here.py", "--device", "cpu", "--run-dir", "new")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("raise SystemExit('ran')")


@pytest.fixture
def plan(capsys, monkeypatch):
    """Run `train FLAGS --dry-run` in an environment; returns its lines, with single spaces."""

    def lines(*flags, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        assert run([*TRAIN, *flags, "--dry-run"]) == 0
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return lines


@pytest.fixture
def worker(monkeypatch):
    """Run `train FLAGS` as a worker; returns what it is and what its script would find in the environment."""

    def found(*flags, **environ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        for name in names:
            monkeypatch.setenv(name, environ.get(name, ""))  # restored afterwards
        seen = []
        monkeypatch.setattr(start, "_run_as_worker", lambda overrides, merged, this, *more: seen.append(this) or 0)
        assert run([*TRAIN, *flags]) == 0
        return seen[0], {name: os.environ[name] for name in names if os.environ[name]}

    return found


def processes(lines):
    return next(line.removeprefix("processes ") for line in lines if line.startswith("processes "))


@pytest.mark.parametrize("ask", [["--nproc-per-node", "4"], ["--world-size", "4"], ["--config", "four.yaml"]])
def test_a_stale_rank_0_is_named_and_the_processes_are_started(ask, plan, tmp_path):
    (tmp_path / "four.yaml").write_text("nproc_per_node: 4\n")

    lines = plan(*ask, RANK="0", WORLD_SIZE="8")

    assert processes(lines).startswith("4 processes, device cpu")
    (line,) = [line for line in lines if "RANK" in line]
    assert line == "RANK=0 and WORLD_SIZE=8 in the environment are ignored, because nproc_per_node=4 is given"


def test_a_rank_above_0_beside_a_request_is_refused(plan):
    with pytest.raises(ConfigError, match=r"RANK=2 and WORLD_SIZE=4 .* unset RANK and WORLD_SIZE"):
        plan("--nproc-per-node", "4", RANK="2", WORLD_SIZE="4")


def test_without_a_request_a_bare_rank_is_a_worker(worker):
    found, _ = worker(RANK="2", WORLD_SIZE="4", MASTER_ADDR="h", MASTER_PORT="1234")
    assert (found.rank, found.world_size, found.master_addr) == (2, 4, "h")


def test_world_size_alone_is_refused(plan):
    with pytest.raises(ResourceError, match="WORLD_SIZE=4 without RANK"):
        plan(WORLD_SIZE="4")
    assert processes(plan("--nproc-per-node", "4", WORLD_SIZE="4")).startswith("4 processes")


def test_the_launcher_merges_the_settings_once_with_what_the_environment_adds(plan, monkeypatch):
    merged = []
    monkeypatch.setattr(start, "merge", lambda *layers: merged.append(merge(*layers)) or merged[-1])
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "29500"}
    assert processes(plan("--world-size", "4", **pod)).startswith("2 processes on each of 2 nodes")
    assert [(each.config.node_rank, each.config.nproc_per_node) for each in merged] == [(1, 2)]


# --world-size and --rank


def test_world_size_is_the_number_of_processes_over_all_nodes(plan, monkeypatch, tmp_path):
    assert processes(plan("--world-size", "4")).startswith("4 processes, device cpu")
    nodes = ["--num-nodes", "2", "--master-addr", "localhost"]
    (tmp_path / "nodes.yaml").write_text("num_nodes: 2\nmaster_addr: localhost\nmaster_port: 29511\nnode_rank: 1\n")
    assert processes(plan("--world-size", "4", "--config", "nodes.yaml")).startswith("2 processes on each of 2 nodes")
    with pytest.raises(ConfigError, match=r"world_size=3 is not divisible by num_nodes=2: set a multiple of 2"):
        plan("--world-size", "3", *nodes)
    with pytest.raises(ConfigError, match="--world-size 4 contradicts --nproc-per-node 2: drop one"):
        plan("--world-size", "4", "--nproc-per-node", "2")
    assert processes(plan("--world-size", "4", "--nproc-per-node", "4")).startswith("4 processes")


def test_with_a_rank_this_command_is_one_worker_of_the_world(plan, worker):
    flags = ["--world-size", "8", "--rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500"]

    assert "this command rank 1 of 8, joins the others at 10.0.0.1:29500" in plan(*flags)
    with socket.create_server(("", 0)) as listening:  # rank 0, which is there already
        port = str(listening.getsockname()[1])
        assert processes(plan(*flags[:-1], port)).startswith("8 processes")
    found, environ = worker(*flags)

    assert (found.rank, found.world_size) == (1, 8)
    assert environ.items() >= {
        "RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "1",
    }.items()  # fmt: skip
    found, environ = worker("--world-size", "2", "--rank", "0", LOCAL_WORLD_SIZE="1")
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"], found.local_world_size) == ("127.0.0.1", "29500", 1)


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (["--rank", "1"], {}, "--rank 1 needs --world-size"),
        (["--world-size", "2", "--rank", "2"], {}, "--rank 2 is not below --world-size 2"),
        (["--world-size", "2", "--rank", "-1"], {}, "rank=-1 must be at least 0: give --rank 0 or more"),
        (["--world-size", "0"], {}, "world_size=0 must be at least 1: give --world-size 1 or more"),
        (["--world-size", "2", "--rank", "one"], {}, "rank='one' is not a whole number: give one, such as --rank 0"),
        (["--world-size", "2", "--rank", "1", "--nproc-per-node", "2"], {}, "--nproc-per-node is for starting several"),
        (["--world-size", "2", "--rank", "1", "--num-nodes", "2"], {}, "--num-nodes is for starting several"),
        (["--world-size", "2", "--rank", "1"], {"RANK": "0", "WORLD_SIZE": "2"}, "--rank 1 contradicts RANK=0 in the"),
        (
            ["--set", "rank=1"],
            {},
            "rank is not a setting: 'train --world-size N --rank R' starts one process, rank R of N",
        ),
    ],
)
def test_a_rank_that_cannot_be_is_refused(flags, environ, said, plan):
    with pytest.raises(ConfigError) as error:
        plan(*flags, **environ)
    assert said in str(error.value)


# nodes of Slurm and pods

TASK = {  # one task per node, the second of two
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip


def values(lines, *names):
    return [line.split()[1] for name in names for line in lines if line.startswith(f"{name} ")]


@pytest.mark.parametrize("ask", [["--nproc-per-node", "8"], ["--world-size", "16"]])
def test_a_node_of_slurm_keeps_its_place_where_a_port_or_the_nodes_are_set(ask, plan):
    lines = plan(*ask, "--master-port", "29511", "--num-nodes", "2", **TASK)

    assert processes(lines).startswith("8 processes on each of 2 nodes")
    assert values(lines, "node_rank", "master_addr", "master_port") == ["1", "gpu07", "29511"]


def test_a_task_of_slurm_takes_world_size_as_the_number_of_all_tasks(worker):
    step = {
        **TASK,
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    for flags in (["--world-size", "4"], ["--world-size", "4", "--master-addr", "gpu07", "--master-port", "29511"]):
        found, _ = worker(*flags, **step)
        assert (found.rank, found.world_size, found.local_rank, found.source) == (3, 4, 1, "slurm")


def test_a_pod_of_kubeflow_launches_its_node(plan):
    pod = {
        "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "4", "RANK": "2", "WORLD_SIZE": "12",
        "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "MASTER_ADDR": "job-master-0",
    }  # fmt: skip
    lines = plan(**pod)
    assert processes(lines).startswith("4 processes on each of 3 nodes")
    assert values(lines, "node_rank", "master_addr", "master_port") == ["2", "job-master-0", "23456"]
    assert processes(plan("--nproc-per-node", "2", **pod)).startswith("2 processes on each of 3 nodes")


def test_a_pod_of_an_indexed_job_is_its_worker_or_launches_its_node(plan, worker):
    pod = {"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "2345"}
    assert processes(plan("--nproc-per-node", "2", **pod)).startswith("2 processes on each of 2 nodes")
    found, _ = worker(**pod)
    assert (found.rank, found.world_size, found.local_rank, found.source) == (1, 4, 0, "pod")


def test_each_refusal_is_one_line_with_its_exit_code(plan):
    for flags, environ, code in ([], {"WORLD_SIZE": "4"}, 3), (["--rank", "1"], {}, 2):
        with pytest.raises(DistributedError) as error:
            plan(*flags, **environ)
        assert error.value.exit_code == code and "\n" not in str(error.value)
