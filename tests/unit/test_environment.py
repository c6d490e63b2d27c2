"""Which processes already are workers, by what their launcher left in the environment."""

from __future__ import annotations

import json

import pytest

from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import NodeEnvironment
from distributed.launching.environments.registry import node_environment, worker_environment
from distributed.launching.environments.slurm import expand_hostlist
from distributed.launching.environments.torchrun import pass_over_stale_rank

STEP = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
PER_NODE = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def worker(environ, argv=(), **more):
    return worker_environment(environ, argv, **more)


def test_a_plain_process_is_no_worker():
    assert worker({}) is None
    assert worker({"RANK": "0"}) is None
    assert worker({"RANK": "", "WORLD_SIZE": ""}) is None


def test_torchruns_variables():
    found = worker({
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "h",         "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2",
    })  # fmt: skip

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.node_rank) == (3, 1, 4, 2, 1)
    assert (found.master_addr, found.master_port, found.restart_count) == ("h", 1234, 2)


def test_a_given_tensorflow_cluster_wins_over_the_one_task_of_an_interactive_step():
    text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"index": 1}}'
    interactive = {**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"}

    assert (worker({**interactive, "TF_CONFIG": text}).rank, worker({**interactive, "TF_CONFIG": text}).world_size) == (
        1,
        2,
    )
    assert worker({**interactive, "TF_CONFIG": "{"}).world_size == 1
    assert worker({**STEP, "TF_CONFIG": text}).source == "slurm"


def test_explicit_variables_win_over_slurm_and_open_mpi():
    found = worker({**STEP, **MPI, "RANK": "0", "WORLD_SIZE": "1"})

    assert (found.rank, found.world_size, found.source) == (0, 1, "environment")


@pytest.mark.parametrize("spelling", ["--local_rank=1", "--local-rank=1"])
def test_the_local_rank_of_torch_distributed_launch(spelling):
    environ = {"RANK": "5", "WORLD_SIZE": "8"}

    assert worker(environ, ["train.py", spelling, "--lr=1"]).local_rank == 1
    assert worker({**environ, "LOCAL_RANK": "2"}, ["train.py", spelling]).local_rank == 2


def test_a_task_of_an_srun_step():
    found = worker(STEP)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.node_rank) == (3, 1, 4, 2, 1)
    assert (found.master_addr, found.source) == ("gpu07", "slurm")


def test_all_tasks_of_a_step_meet_at_one_port_and_other_jobs_at_another():
    port = worker(STEP).master_port

    assert worker({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master_port == port
    assert worker({**STEP, "SLURM_JOB_ID": "813"}).master_port != port
    assert 1024 < port < 32768


@pytest.mark.parametrize("step", [None, "4294967291", "-5", "4294967290"])
def test_a_batch_shell_has_slurm_procid_0_and_is_no_worker(step):
    environ = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"} | {"SLURM_PROCID": "0"}

    assert worker(environ if step is None else {**environ, "SLURM_STEP_ID": step}) is None


def test_one_task_per_node_with_several_processes_launches_its_node():
    assert worker(PER_NODE, nproc_per_node=2) is None
    assert worker(PER_NODE).rank == 1
    found = node_environment(PER_NODE)
    assert isinstance(found, NodeEnvironment)
    assert (found.num_nodes, found.node_rank, found.master_addr) == (2, 1, "gpu07")
    assert node_environment(STEP) is None


def test_open_mpi_on_one_node():
    found = worker(MPI)

    assert (found.rank, found.local_rank, found.world_size, found.master_addr, found.source) == (
        1,
        1,
        2,
        "127.0.0.1",
        "openmpi",
    )


def test_open_mpi_on_several_nodes_must_say_where_to_meet():
    environ = {**MPI, "OMPI_COMM_WORLD_SIZE": "4"}

    with pytest.raises(ResourceError, match="-x MASTER_ADDR="):
        worker(environ)
    assert worker({**environ, "MASTER_ADDR": "n1"}).master_addr == "n1"


def test_open_mpi_on_several_nodes_meets_where_mpirun_runs_if_rank_0_is_there():
    mpirun, other = "7.0;tcp://10.99.0.1:4711", "7.1;tcp://10.99.0.2:4712"
    of_mpirun = {"OMPI_MCA_orte_hnp_uri": mpirun, "OMPI_MCA_orte_local_daemon_uri": mpirun}
    environ = {**MPI, **of_mpirun, "OMPI_COMM_WORLD_SIZE": "4"}
    first = {**environ, "OMPI_COMM_WORLD_RANK": "0"}

    assert worker(first).master_addr == "10.99.0.1"
    assert worker({**environ, "OMPI_MCA_orte_local_daemon_uri": other}).master_addr == "10.99.0.1"
    with pytest.raises(ResourceError, match="-x MASTER_ADDR="):
        worker({**first, "OMPI_MCA_orte_local_daemon_uri": other})
    with pytest.raises(ResourceError, match="-x MASTER_ADDR="):  # several addresses
        worker({**environ, "OMPI_MCA_orte_hnp_uri": "7.0;tcp://10.99.0.1,172.17.0.1:4711"})


def test_horovodrun_over_gloo():
    environ = {
        "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "h1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
    }  # fmt: skip

    found = worker(environ)

    assert (found.rank, found.local_rank, found.world_size, found.local_world_size, found.node_rank) == (3, 1, 4, 2, 1)
    assert (found.master_addr, found.source) == ("h1", "horovodrun")
    assert found.master_port != worker({**environ, "HOROVOD_GLOO_RENDEZVOUS_PORT": "4712"}).master_port
    assert worker({**environ, **MPI}).source == "openmpi"


@pytest.mark.parametrize(
    ("inner", "source"), [(MPI, "openmpi"), ({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}, "horovodrun")]
)
def test_mpirun_and_horovodrun_count_in_the_shell_of_an_srun_step(inner, source):
    shell = {**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_NODES": "1"}

    found = worker({**shell, **inner})

    assert (found.rank, found.world_size, found.source) == (1, 2, source)
    assert node_environment(shell) is not None
    assert node_environment({**shell, **inner}) is None


@pytest.mark.parametrize("wrong", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_impossible_variables_are_an_error(wrong):
    with pytest.raises(ResourceError, match="RANK="):
        worker(wrong)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],gpu1", ["n01", "n02", "n03", "n7", "gpu1"]),
        ("r[1-2]c[8,9]-ib", ["r1c8-ib", "r1c9-ib", "r2c8-ib", "r2c9-ib"]),
        ("", []),
    ],
)
def test_compressed_host_lists(text, hosts):
    assert expand_hostlist(text) == hosts


def test_what_a_plain_script_reads():
    assert worker(STEP).to_environ() | {"MASTER_PORT": ""} == {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "",
    }  # fmt: skip


def test_a_tf_config_of_several_workers_makes_this_process_one_of_them():
    def found(kind, index, **cluster):
        text = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        return worker_environment({"TF_CONFIG": text}, [])

    workers = ["a:1", "b:2", "b:3"]
    third = found("worker", 1, chief=["a:1"], worker=workers[1:])
    assert (third.rank, third.world_size, third.local_rank, third.local_world_size, third.node_rank) == (2, 3, 1, 2, 1)
    assert third.master_addr == "a" and third.source == "TF_CONFIG"
    assert found("chief", 0, chief=["a:1"], worker=workers[1:]).rank == 0
    assert {found("worker", rank, worker=workers).master_port for rank in range(3)} == {third.master_port}
    assert found("worker", 1, worker=["[fd00::1]:1", "[fd00::2]:1"]).master_addr == "fd00::1"
    assert found("worker", 0, worker=["a:1"]) is None
    assert found("worker", 0, ps=["a:1"], worker=workers) is None  # the backend says why
    assert worker_environment({"TF_CONFIG": "{", "RANK": "1", "WORLD_SIZE": "2"}, []).rank == 1


# ------------------------------------------------------------------ RANK and WORLD_SIZE by hand

BY_HAND = {"RANK": "0", "WORLD_SIZE": "4"}


def test_a_bare_rank_is_a_worker_where_nobody_asks_for_processes():
    assert worker(BY_HAND).world_size == 4
    assert worker({**BY_HAND, "RANK": "3"}).rank == 3


@pytest.mark.parametrize("beside", [{"LOCAL_RANK": "0"}, {"TORCHELASTIC_RUN_ID": "x"}])
def test_what_launchers_set_beside_rank_makes_a_worker_also_where_processes_are_asked_for(beside):
    found = worker({**BY_HAND, "RANK": "2", **beside}, nproc_per_node=2)

    assert (found.rank, found.world_size) == (2, 4)
    environ = {**BY_HAND, **beside}
    assert pass_over_stale_rank(environ, [], nproc_per_node=2) is None and "RANK" in environ
    assert worker({**BY_HAND, "RANK": "2"}, ["train.py", "--local-rank=0"], nproc_per_node=2).rank == 2


def test_a_bare_rank_0_is_passed_over_beside_a_request_and_named():
    assert worker(BY_HAND, nproc_per_node=4) is None
    environ = {**BY_HAND, "MASTER_ADDR": "h"}

    line = pass_over_stale_rank(environ, [], nproc_per_node=4)

    assert line == "RANK=0 and WORLD_SIZE=4 in the environment are ignored, because nproc_per_node=4 is given"
    assert environ == {"MASTER_ADDR": "h"}
    assert worker({**MPI, **BY_HAND}, nproc_per_node=2).source == "openmpi"


def test_a_bare_rank_above_0_is_refused_beside_a_request():
    with pytest.raises(ConfigError, match=r"RANK=1 and WORLD_SIZE=4 .* nproc_per_node=2 .* unset RANK and WORLD_SIZE"):
        worker({**BY_HAND, "RANK": "1"}, nproc_per_node=2)
    environ = {**BY_HAND, "RANK": "1"}
    assert pass_over_stale_rank(environ, [], nproc_per_node=2) is None and environ["RANK"] == "1"


def test_a_rank_exported_in_a_batch_script_contradicts_the_task_it_reaches():
    """`export RANK=$SLURM_PROCID` before `srun` is 0 in all tasks, and so is LOCAL_RANK."""
    exported = {**STEP, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}

    with pytest.raises(ResourceError, match=r"RANK=0 contradicts SLURM_PROCID=3: .*drop 'export RANK'"):
        worker(exported)
    assert worker({**exported, "SLURM_PROCID": "0"}).rank == 0  # cannot be told from a right one
    assert worker({**exported, "RANK": "3"}).source == "environment"
    assert worker({**exported, "TORCHELASTIC_RUN_ID": "x"}).rank == 0  # torchrun in each task
    assert worker({**exported, "WORLD_SIZE": "8"}).world_size == 8  # somebody starts more processes in each task
    assert worker({**exported, **MPI}).rank == 0
    without_step = {name: value for name, value in exported.items() if name != "SLURM_STEP_ID"}
    with pytest.raises(ResourceError, match="RANK=0 contradicts SLURM_PROCID=3"):
        worker(without_step)  # the shell of sbatch has SLURM_PROCID=0, so that 3 is a task's
    assert worker({**without_step, "SLURM_PROCID": "0", "RANK": "2"}).rank == 2  # that shell, and a rank set by hand
    bare = {**PER_NODE, "RANK": "0", "WORLD_SIZE": "2"}
    assert worker(bare, nproc_per_node=8) is None  # a node launcher, which RANK=0 does not concern


def test_world_size_without_rank_is_refused_unless_it_is_what_is_started():
    alone = {"WORLD_SIZE": "4"}

    with pytest.raises(
        ResourceError, match=r"WORLD_SIZE=4 without RANK: each of 4 such processes .* JOB_COMPLETION_INDEX"
    ):
        worker(alone)
    with pytest.raises(ResourceError, match="WORLD_SIZE=4 without RANK beside nproc_per_node=2"):
        worker(alone, nproc_per_node=2)
    assert worker(alone, nproc_per_node=4) is None
    assert worker(alone, nproc_per_node=2, num_nodes=2) is None
    assert worker({"WORLD_SIZE": "1"}) is None
    assert worker({**STEP, **alone}).rank == 3 and worker({**MPI, **alone}).rank == 1


def test_rank_without_world_size_is_refused_above_0():
    with pytest.raises(ResourceError, match="RANK=2 without WORLD_SIZE"):
        worker({"RANK": "2"})
    assert worker({"RANK": "general"}) is None  # of a program that has nothing to do with this


# ------------------------------------------------------------------ pods

INDEXED = {"WORLD_SIZE": "4", "JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "2345"}
KUBEFLOW = {  # a worker of a PyTorchJob with three replicas
    "PET_NNODES": "3", "PET_NODE_RANK": "2", "RANK": "2", "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456",
}  # fmt: skip
KUBEFLOW_OF_4 = {**KUBEFLOW, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"}


def test_a_pod_of_an_indexed_job_is_the_worker_of_its_index():
    found = worker(INDEXED)

    assert (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank) == (2, 4, 0, 1, 2)
    assert (found.master_addr, found.master_port, found.source) == ("train-0.train", 2345, "pod")
    assert worker({"JOB_COMPLETION_INDEX": "2"}) is None  # tasks that have nothing to do with each other
    assert worker({**INDEXED, "RANK": "3"}).rank == 3
    with pytest.raises(ResourceError, match="JOB_COMPLETION_INDEX=2 is not below WORLD_SIZE=2"):
        worker({**INDEXED, "WORLD_SIZE": "2"})
    with pytest.raises(ResourceError, match="MASTER_ADDR is not set"):
        worker({**INDEXED, "MASTER_ADDR": ""})


def test_a_pod_of_an_indexed_job_launches_its_node_where_processes_are_asked_for():
    eight = {**INDEXED, "WORLD_SIZE": "8"}

    assert worker(eight, nproc_per_node=2) is None
    assert node_environment(eight, nproc_per_node=2) == NodeEnvironment(4, 2, "train-0.train", 2345)
    assert node_environment(eight) is None
    with pytest.raises(ResourceError, match=r"WORLD_SIZE=4 does not fit 2 processes .* number of pods x 2"):
        worker(INDEXED, nproc_per_node=2)  # four pods of two processes are a world of eight


def test_kubeflows_variables_make_a_pod_one_worker_or_the_launcher_of_its_node():
    found = worker(KUBEFLOW)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 3, 0, 1)

    assert worker(KUBEFLOW, nproc_per_node=2) is None
    assert node_environment(KUBEFLOW, nproc_per_node=2).node_rank == 2
    assert node_environment(KUBEFLOW_OF_4) == NodeEnvironment(3, 2, "job-master-0", 23456, 4)
    assert node_environment({**KUBEFLOW_OF_4, "PET_NPROC_PER_NODE": "auto"}).nproc_per_node == 4
    without_rank = {name: value for name, value in KUBEFLOW_OF_4.items() if name not in ("RANK", "WORLD_SIZE")}
    assert node_environment(without_rank) == node_environment(KUBEFLOW_OF_4)
    assert node_environment({**KUBEFLOW_OF_4, "LOCAL_RANK": "0"}) is None
    assert pass_over_stale_rank({**KUBEFLOW, "RANK": "0", "PET_NODE_RANK": "0"}, [], nproc_per_node=2) is None
    with pytest.raises(ResourceError, match="asks for 4 processes in this pod: start the script with"):
        worker(KUBEFLOW_OF_4)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"PET_NNODES": "1:4"}, "PET_NNODES='1:4' is not a single number of nodes"),
        ({"PET_NODE_RANK": "3", "RANK": "3", "WORLD_SIZE": "4"}, "PET_NODE_RANK=3 is not below PET_NNODES=3"),
        (
            {"PET_NODE_RANK": "", "RANK": "", "WORLD_SIZE": ""},
            "PET_NODE_RANK is not set beside PET_NNODES=3: set it .*from 0 to 2",
        ),
        ({"PET_NODE_RANK": "x", "RANK": "", "WORLD_SIZE": ""}, "PET_NODE_RANK='x' is not a whole number"),
    ],
)
def test_variables_of_a_pod_that_make_no_sense_are_an_error(wrong, said):
    with pytest.raises(ResourceError, match=said):
        worker({**KUBEFLOW, **wrong})
