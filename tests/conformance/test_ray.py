"""A script under Ray has the same environment, console, ends, restarts and bits as under our own launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests import ray_clusters
from tests.conformance import test_whole_model as whole_model
from tests.conformance.runs import arguments, assert_same, digests, events, newest
from tests.conftest import clean_environment, free_port, needs_backend
from tests.ray_clusters import OPEN

JOBS = Path(__file__).parent / "jobs" / "ray"
CLI = [sys.executable, "-m", "distributed.cli"]
pytestmark = pytest.mark.timeout(480)


def on_a_cluster(test):
    """Mark a test of a cluster that runs already, for `make test-cluster`. One test process runs all of them, on one cluster."""
    return pytest.mark.cluster(pytest.mark.xdist_group("a cluster of Ray")(test))


@pytest.fixture(autouse=True, scope="module")
def _ray():
    needs_backend("ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a cluster of two CPUs, and yield its address, the address of its client server, and the path of a file.

    While the file exists, the next process that the client server forks for a client fails. The server waits for such a process
    longer than the default of 30 s, as a busy machine needs more.
    """
    directory = tmp_path_factory.mktemp("cluster")
    port, failing = free_port(), directory / "failing"
    environ = {
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120", "FAILING_SERVER": str(failing),
        "PYTHONPATH": f"{clean_environment()['PYTHONPATH']}:{JOBS / 'head'}",
    }  # fmt: skip
    with ray_clusters.head(
        directory, "--num-cpus=2", "--include-dashboard=false", client_port=port, **environ
    ) as address:
        yield address, f"ray://127.0.0.1:{port}", failing


def plain(out, mode, *flags):
    return [
        "train", "--script", str(JOBS / "plain.py"), "--backend", "ray", "--nproc-per-node", "2",
        "--run-dir", str(out / "run"), *flags, "--", mode,
    ]  # fmt: skip


def check_plain(done, out, world, threads, *first):
    """Check what a torchrun script finds, and what the console and the logs show of it."""
    assert done.returncode == 0, done.output
    *shown, seen = (
        line for line in done.stdout.splitlines() if not line.startswith("Ray has not placed the workers yet")
    )
    assert json.loads(seen) == {
        "sum": sum(range(world + 1)), "argv": ["go"], "is_main": True, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "OMP_NUM_THREADS": threads, "TORCHELASTIC_RESTART_COUNT": "0",
        "secret_length": 64, "num_secrets": 1,
    }  # fmt: skip
    begins = (*first, f"{world} processes", "run directory", f"starting {world} workers (ray, cpu)", "rank 0 is here")
    assert len(shown) == len(begins) and all(map(str.startswith, shown, begins)), shown
    assert done.stderr == ""
    assert re.fullmatch(r"\[rank 1 \S+\] rank 1 is here\n", (out / "run" / "logs" / "rank-1.log").read_text())


@on_a_cluster
def test_an_existing_cluster_is_joined_by_its_address(run_cli, tmp_path, cluster):
    """Three processes join with half a CPU each, for which the cluster has room, and with the user's number of threads.

    Values in their store are signed with a secret of this run. The caller's own secret, which Ray would show to others, is not
    passed on.
    """
    flags = plain(tmp_path, "go", "--address", cluster[0], "--nproc-per-node", "3", "--set", "ray.cpus_per_worker=0.5")
    environ = {**OPEN, "OMP_NUM_THREADS": "3", "DISTRIBUTED_TOKEN": "0123456789abcdef"}
    done = run_cli(flags, env=environ, timeout=180)
    check_plain(done, tmp_path, 3, "3", "no effect over Ray: DISTRIBUTED_TOKEN (")
    assert environ["DISTRIBUTED_TOKEN"] not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()
    )


@pytest.mark.full
def test_a_sharded_model_is_whole_after_a_fit(run_cli, tmp_path, cluster):
    flags = ["--backend", "ray", "--address", cluster[0], "--set", "ray.engine=fsdp"]
    facts, _ = whole_model.train(run_cli, tmp_path, "ray", *flags, env=OPEN)
    whole_model.check(tmp_path, facts, "gpt")


@on_a_cluster
def test_a_script_that_fails_and_the_client_server(run_cli, tmp_path, cluster):
    """The first process of the server for this client dies. Ray's own client would then wait for minutes and fail."""
    cluster[2].touch()
    done = run_cli(plain(tmp_path, "fail", "--address", cluster[1]), env=OPEN, timeout=180)
    assert done.returncode == 1, done.output
    assert done.output.count("ValueError: of rank 1") == 1 and "error: rank 1 failed with ValueError" in done.stderr
    # The output has no words of Ray itself.
    assert "ray" not in re.sub(r"\S*/\S*", "", done.stderr).lower(), done.stderr
    assert events(tmp_path / "run").count("worker_failed") == 1
    assert not cluster[2].exists()


@on_a_cluster
def test_more_processes_than_the_cluster_has_cpus_are_refused(run_cli, tmp_path, cluster):
    flags = plain(tmp_path, "go", "--address", cluster[0], "--set", "ray.cpus_per_worker=1.5")
    done = run_cli(flags, env=OPEN, fresh=True)
    assert done.returncode == 3 and done.within(15), done.output
    assert "needs 3 CPUs" in done.stderr and "has 2: set nproc_per_node=1, or ray.cpus_per_worker=1" in done.stderr


# A fit in a run directory in which an earlier fit has finished.
AGAIN = """
import json, sys
from pathlib import Path
from distributed.launching.request import LaunchRequest
from distributed.launching.subprocess_launch import start_launcher
from distributed.training.remote import failure
from distributed.runs.directory import RunDirectory

Path("run").mkdir()
Path("run", "result.json").write_text(json.dumps({"status": "finished", "error": "long ago"}))
Path("job").write_bytes(b"")
request = LaunchRequest(
    "run", payload="job", resume=True, nproc_per_node=100, launcher="distributed.backends._ray.launch",
    launcher_options={"address": sys.argv[1], "cpus": 1.0},
)
code = start_launcher(request)
print(code, failure(code, RunDirectory("run"), 0))
"""


@on_a_cluster
def test_why_no_worker_started_is_what_fit_raises(run_python, tmp_path, cluster):
    done = run_python(["-c", AGAIN, cluster[0]], cwd=tmp_path, env=OPEN, timeout=180)
    assert done.stdout.startswith("3 nproc_per_node=100 with ray.cpus_per_worker=1 needs 100 CPUs"), done.output
    assert done.stderr == ""


def test_an_address_that_does_not_answer_is_refused_at_once(run_cli, tmp_path):
    done = run_cli(plain(tmp_path, "go", "--address", f"ray://127.0.0.1:{free_port()}"), fresh=True)
    assert done.returncode == 3 and done.within(5), done.output
    assert "does not answer" in done.stderr and "ray start --head" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_client_server_that_says_nothing_is_given_up(run_cli, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=greet, args=(server,), daemon=True).start()
        address = f"ray://127.0.0.1:{server.getsockname()[1]}"
        done = run_cli(plain(tmp_path, "go", "--address", address, "--set", "start_timeout=6"), env=OPEN, timeout=120)
    assert done.returncode == 3, done.output
    assert f"the Ray cluster at {address} could not be joined (no answer within 6 s): 'ray status' there" in done.stderr


def greet(server):
    """Answer each connection with the first bytes of an HTTP/2 server, and then send nothing."""
    connections = []
    with contextlib.suppress(OSError):
        while True:
            connections.append(server.accept()[0])
            connections[-1].sendall(b"\0\0\0\4\0\0\0\0\0")


def test_more_processes_than_this_machine_has_cpus_are_refused_at_once(run_cli, tmp_path):
    cores = len(os.sched_getaffinity(0))
    done = run_cli([*plain(tmp_path, "go")[:-2], "--nproc-per-node", str(cores + 3)], fresh=True)
    assert done.returncode == 3 and done.within(5), done.output
    assert f"needs {cores + 3} CPUs, but this machine has {cores}: set nproc_per_node={cores}" in done.stderr


# The files that Ray Train itself kept of a run.
KEPT = """
import json, os, sys
os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
from ray.train import Result

print(json.dumps(Result.from_path(sys.argv[1]).metrics))
"""


def test_killed_it_starts_again_ends_in_the_bits_of_ddp_and_tells_ray_of_each_epoch_once(run_cli, run_python, tmp_path):
    """The run is killed in the save after the first epoch. After the restart this epoch ends a second time."""
    watch = ["--set", "ray.callbacks=epochs_of_ray.Epochs"]
    for name, faults, *flags in (("clean", [], "pytorch-ddp"), ("hurt", [["save", 3, 1]], "ray", *watch)):
        (tmp_path / name).mkdir()
        done = run_cli(arguments(tmp_path / name, faults, "--backend", *flags), timeout=120)
        assert done.returncode == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "hurt" / "run" / "metrics.jsonl").read_text().splitlines()]
    heard = [
        json.loads(line)
        for line in (tmp_path / "hurt" / "run" / "logs" / "ray" / "epochs.jsonl").read_text().splitlines()
    ]
    assert [row["epoch"] for row in heard] == [1, 2, 3] and [row["step"] for row in heard] == [7, 14, 21]
    assert heard[-1]["val_loss"] == next(row["loss"] for row in reversed(rows) if row["split"] == "val")
    kept = run_python(["-c", KEPT, str(tmp_path / "hurt" / "run" / "logs" / "ray" / "train")])
    assert json.loads(kept.stdout) == heard[-1], kept.output
    assert "rank 1 was killed by signal 9 (SIGKILL): restarting (1 of 20)" in done.stderr
    assert events(tmp_path / "hurt" / "run").count("restarted") == 1
    assert_same(tmp_path / "hurt", tmp_path / "clean")


@pytest.mark.full
def test_no_restart_is_left_for_a_worker_that_dies(run_cli, tmp_path, cluster):
    done = run_cli(plain(tmp_path, "die", "--max-restarts", "0", "--address", cluster[0]), env=OPEN, timeout=180)
    assert done.returncode == 1, done.output
    assert done.stderr.strip() == "error: rank 1 was killed by signal 9 (SIGKILL); max_restarts=0"


@pytest.mark.full
def test_stopped_all_ranks_save_at_one_step_and_another_backend_goes_on(start, run_cli, tmp_path):
    command = start(
        [*CLI, *arguments(tmp_path, [], "--backend", "ray", "--log-every-n-steps", "1")], env={"SLOW": "0.05"}
    )
    command.wait_for("step 3/21", 240)
    command.signal(signal.SIGTERM)
    done = command.finish(120)
    assert done.returncode == 143 and "Traceback" not in done.output, done.output
    assert events(tmp_path / "run")[-1] == "preempted"
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "interrupted" and 3 <= result["steps"] < 21
    again = run_cli(arguments(tmp_path, [], "--resume", "--backend", "pytorch-ddp"))
    assert again.returncode == 0 and f"resumed from step-{result['steps']:08d}" in again.stdout, again.output
    (tmp_path / "clean").mkdir()
    assert run_cli(arguments(tmp_path / "clean")).returncode == 0
    assert digests(newest(tmp_path / "run")) == digests(newest(tmp_path / "clean" / "run"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_while_ray_starts_it_can_be_ended_and_leaves_nobody(start, tmp_path, number):
    with tempfile.TemporaryDirectory(prefix="r-") as scratch:  # short: sockets lie in it
        command = start([*CLI, *plain(tmp_path, "go")], env={"TMPDIR": scratch})
        command.wait_for(lambda: any("raylet" in name for name in names(command.alive())), 60)
        (files,) = Path(scratch).glob("ray-*")  # Ray itself would make them readable for everyone
        assert files.stat().st_mode & 0o777 == 0o700 and list(files.glob("*/*/sockets"))
        assert (
            int((files / "owner").read_text().split()[2]) in command.alive()
        )  # if this process is killed too, the next start removes them
        command.signal(number)
        done = command.finish(120, grace=15)  # fails if a process is left
        assert done.returncode == (130 if number == signal.SIGINT else -number), done.output
        assert not list(Path(scratch).glob("ray-*"))


def names(pids):
    for pid in pids:
        try:
            yield Path(f"/proc/{pid}/comm").read_text()
        except OSError:
            continue


@pytest.mark.full
def test_fit_of_a_plain_script_brings_the_weights_back(run_python, tmp_path):
    done = run_python([str(JOBS / "fit.py")], cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["says"] == "ray" and found["steps"] == 12 and found["is_cut"] == 1.0
    assert found["moved"] > 0.05 and found["gained"] > 0 and 0.5 < found["accuracy"] <= found["best"]
    assert "fsdp.reshard_after_forward is not used" not in done.output


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("own bundles", "stopped workers"), id="workers", marks=pytest.mark.conformance),
        pytest.param(
            ("alone", "one bundle", "validations", "stopped alone", "too small"), id="others", marks=pytest.mark.full
        ),
    ],
)
def test_a_trial_of_ray_tune_trains_in_its_own_placement_group(run_python, tmp_path, names):
    """The cluster has only the CPUs of the trial, so workers outside of its placement group would wait forever.

    Tune gets the metrics of epochs where `report_to_tune` is set. Where it stops a trial, the workers save and leave.
    """
    with tempfile.TemporaryDirectory(prefix="tune-") as out:
        done = run_python([str(JOBS / "trials.py"), out, *names], cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    for name in {"alone", "one bundle", "own bundles"} & found.keys():
        last = found[name]["last"]
        assert last["result"]["world_size"] == (1 if name == "alone" else 2) and last["result"]["backend"] == "ray"
        assert last["score"] == last["result"]["best_metrics"]["val_accuracy"] > 0.5
        assert found[name]["best"] == 8
        told = [] if name == "alone" else [1, 2, 3, 4, 5, 6]
        # The last row is what the function returned.
        assert [row["epoch"] for row in found[name]["heard"]] == [*told, None]
        if name != "alone":
            assert [row["step"] for row in found[name]["heard"]][:2] == [3, 6]
            assert found[name]["heard"][0]["val_loss"] > found[name]["heard"][5]["val_loss"] > 0
    if "validations" in names:
        *told, last = found["validations"]["heard"]
        assert [row["step"] for row in told] == [2, 4, 6] and all(row["val_loss"] > 0 for row in told)
        assert len({row["val_loss"] for row in told}) == 3 and last["score"] > 0
    for name in {"stopped alone", "stopped workers"} & found.keys():
        assert [row["epoch"] for row in found[name]["heard"]] == [1, 2, 3]
        left = found[name]["left"]
        assert left["status"] == "interrupted" and 9 <= left["steps"] < 300000
        assert left["checkpoint"] == f"checkpoints/step-{left['steps']:08d}"
    if "too small" in names:
        refused = "nproc_per_node=2 is more than the 1 that fit into the trial's placement group"
        assert refused in found["too small"]["error"]


@pytest.mark.full
def test_a_node_shows_its_workers_all_their_gpus(run_python, tmp_path):
    """LOCAL_RANK is the index of a worker's own GPU. Ray itself would show each worker only its own, with index 0."""
    with tempfile.TemporaryDirectory(prefix="gpus-") as directory:
        done = run_python([str(JOBS / "gpus.py"), directory], cwd=tmp_path, env=OPEN, timeout=100)
    assert done.returncode == 0, done.output
    for ranks in json.loads(done.stdout.splitlines()[-1]).values():
        assert [local for local, _ in ranks] == ["0", "1"]
        (gpus,) = {gpus for _, gpus in ranks}
        assert len(set(gpus.split(","))) == 2
