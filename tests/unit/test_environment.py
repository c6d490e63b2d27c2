"""Which processes already are workers, by what their launcher left in the environment."""

from __future__ import annotations

import json

import pytest

from distributed.errors import ResourceError
from distributed.launching.environment import NodeEnvironment, expand_hostlist, node_environment, worker_environment

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
    assert found("worker", 0, worker=["a:1"]) is None
    assert found("worker", 0, ps=["a:1"], worker=workers) is None  # the backend says why
    assert worker_environment({"TF_CONFIG": "{", "RANK": "1", "WORLD_SIZE": "2"}, []).rank == 1
