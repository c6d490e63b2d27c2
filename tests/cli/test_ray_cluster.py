"""Runs on Ray clusters: GPUs of the cluster instead of those of the client, several nodes, a node that is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.runs.directory import RunDirectory
from tests import ray_clusters
from tests.conftest import Started, free_port, needs_backend, poll
from tests.machines import Machines, other_version
from tests.ray_clusters import OPEN, RAY

pytestmark = [pytest.mark.timeout(800), pytest.mark.xdist_group("machines of a cluster of Ray")]
ROOT = Path(__file__).resolve().parents[2]
# The variables of docs/ray.md, with which the head notices within three seconds that a node does not answer.
HEALTH = dict(re.findall(r"(RAY_health_check_\w+)=(\d+)", (ROOT / "docs/ray.md").read_text()))
SCRIPT = """
import os, socket, time
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.callbacks import Callback

class Wait(Callback):
    def on_step_end(self, state, result):
        if not os.path.exists("hurry"):
            time.sleep(2.0 if os.path.exists("linger") else float(os.environ.get("WAIT_S", "0")))

def train(**settings):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(160, 4, dtype=torch.float64), torch.randn(160, 1, dtype=torch.float64))
    trainer = Trainer(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01), loss_fn=torch.nn.functional.mse_loss, dtype="float64",
        epochs=4, global_batch_size=8, checkpoint_every_n_steps=5, device="cpu", callbacks=[Wait()], **settings,
    )
    trainer.fit(data)
    if trainer.is_main_process:
        print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""
# A script that the command starts. Each rank writes where it runs.
COMMAND = (
    SCRIPT
    + """
with open(f"place-{os.environ.get('RANK', '')}", "w") as file:
    print(socket.gethostname(), os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("GROUP_WORLD_SIZE"), file=file)
train()
"""
)
# A script that starts its workers itself.
CODE = (
    SCRIPT
    + """
if __name__ == "__main__":
    train(backend="ray", address="10.99.0.1:6399", nproc_per_node=2)
"""
)
ELASTIC = CODE.replace("nproc_per_node=2", "num_workers=(1, 2), elastic_interval_s=5").replace("epochs=4", "epochs=100")
# What stands around the sample of docs/ray.md.
MODEL = """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
"""
SHOW_WEIGHTS = """
print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""
PLANNED = """
import torch
from distributed import Trainer

trainer = Trainer(
    torch.nn.Linear(4, 1), backend="ray", address="ray://10.99.0.1:10001", num_nodes=2, gpus_per_node=2, ray={"cpus_per_worker": 0.5}
)
plan = trainer.plan
print(plan.num_nodes, plan.nproc_per_node, plan.world_size, plan.device, plan.backend)
"""
SHOW = """
import os
print("saw", *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")))
"""
WAIT = """
import sys, time
sys.stdout.flush()
while os.path.exists("wait"):
    time.sleep(0.1)
"""
REFUSED = """
import sys, torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.errors import ResourceError

data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))
trainer = Trainer(torch.nn.Linear(4, 1), backend="ray", address=sys.argv[1], nproc_per_node=2)
print(trainer.plan.world_size, trainer.plan.device)
try:
    trainer.fit(data)
except ResourceError as error:
    print(error)
try:
    Trainer(torch.nn.Linear(4, 1), backend="ray", address=sys.argv[1], nproc_per_node=32)
except ResourceError as error:
    print(error)
"""


@pytest.fixture(autouse=True, scope="module")
def _ray() -> None:
    needs_backend("ray")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Start a cluster of one node that claims eight GPUs. Yield its address and that of its client server."""
    directory, port = tmp_path_factory.mktemp("cluster"), free_port()
    flags = ["--num-cpus=4", "--num-gpus=8", "--include-dashboard=false"]
    with ray_clusters.head(directory, *flags, client_port=port, GRPC_ENABLE_FORK_SUPPORT="0") as address:
        yield address, f"ray://127.0.0.1:{port}"


@pytest.mark.cluster
def test_a_client_without_a_gpu_plans_on_those_of_the_cluster(
    run_cli: Callable[..., Any], tmp_path: Path, cluster: tuple[str, str]
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    train = ["train", "--script", "show.py", "--backend", "ray", "--dry-run"]
    for address, flags, code, said in (
        (cluster[1], ["--num-nodes", "1", "--gpus-per-node", "4"], 0, "4 processes, device cuda"),
        (cluster[0], ["--num-nodes", "4", "--gpus-per-node", "8"], 3, "4 nodes with 8 GPUs"),
        (cluster[0], ["--num-nodes", "4", "--gpus-per-node", "8", "--wait", "60"], 0, "8 processes on each of 4 nodes, device cuda"),
        (cluster[0], ["--nproc-per-node", "9", "--set", "ray.cpus_per_worker=0.1"], 3, "needs as many GPUs, but the Ray cluster"),
    ):  # fmt: skip
        done = run_cli([*train, "--address", address, *flags], cwd=tmp_path, env=OPEN, timeout=90)
        assert done.returncode == code, done.output
        if code:
            host = socket.gethostname()
            assert done.stderr.startswith("error: ") and f"({host}: 8 GPUs, 4 CPUs)" in done.stderr, done.output
            assert len(done.stderr.splitlines()) == 1
        else:
            assert said in done.stdout


@pytest.mark.cluster
def test_the_cluster_gives_each_process_a_gpu_and_a_gpu_that_is_not_there_is_an_error(
    run_cli: Callable[..., Any], run_python: Callable[..., Any], tmp_path: Path, cluster: tuple[str, str]
) -> None:
    """The GPUs of this cluster exist in its bookkeeping only. A script without a Trainer does not use them."""
    (tmp_path / "show.py").write_text(SHOW)
    train = ["train", "--script", "show.py", "--backend", "ray", "--num-gpus", "2", "--address", cluster[0]]
    done = run_cli([*train, "--run-dir", "run"], cwd=tmp_path, env=OPEN, timeout=120)
    assert done.returncode == 0, done.output
    seen = "".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("rank-*.log")))
    (first, second) = re.findall(r"saw (\d) (\d) 2 (\d),(\d)", seen + done.stdout)[:2]
    assert {first[:2], second[:2]} == {("0", "0"), ("1", "1")} and int(first[2]) < int(first[3])

    (tmp_path / "refused.py").write_text(REFUSED)
    done = run_python(["refused.py", cluster[0]], cwd=tmp_path, env=OPEN, timeout=120)
    shown = done.stdout.splitlines()
    assert shown[0] == "2 cuda" and re.match(
        r"rank \d on \S+ was started for a GPU, but no GPU can be seen there", shown[-2]
    ), done.output
    assert "nproc_per_node=32 needs as many GPUs, but the Ray cluster at" in shown[-1] and "has 8 (" in shown[-1]


class RayMachines:
    """A Ray cluster over machines, whose head is the first one. Each has one CPU, and `gpus` GPUs in Ray's bookkeeping only. `health`
    sets Ray's health checks."""

    def __init__(
        self,
        machines: Machines,
        start: Callable[..., Started],
        scratch: str,
        begun: int,
        health: dict[str, str],
        gpus: int,
    ) -> None:
        self.machines, self._start, self._scratch, self._health, self._gpus = machines, start, scratch, health, gpus
        self.nodes: dict[int, Started] = {}
        for number in range(begun):
            self.add(number)

    def add(self, number: int, **environ: str) -> None:
        """Start the node on machine `number` with more variables, and wait until it has joined."""
        address = self.machines.addresses[number]
        role = ["--head", "--port=6399", "--include-dashboard=false"] if number == 0 else ["--address=10.99.0.1:6399"]
        if number == 0:
            role.append(f"--temp-dir={self._scratch}")
        self.nodes[number] = ray_clusters.start(lambda: self._start([
            *self.machines.on(number), RAY, "start", "--block", f"--node-ip-address={address}", "--num-cpus=1", f"--num-gpus={self._gpus}",
            "--object-store-memory=100000000", *role,
        ], env={**OPEN, **self._health, "WAIT_S": "0.1", **environ}))  # fmt: skip

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once, those of the workers too."""
        node = self.nodes.pop(number)
        for pid in node.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.process.wait()

    def run(self, *words: str, machine: int = 0) -> Started:
        """Start a command, by default on the head's machine."""
        return self._start([*self.machines.on(machine), sys.executable, *words], env=OPEN)


@pytest.fixture
def ray_machines(
    make_machines: Callable[..., Machines], start: Callable[..., Started]
) -> Iterator[Callable[..., RayMachines]]:
    made: list[RayMachines] = []
    with tempfile.TemporaryDirectory(prefix="ray-") as scratch:

        def make(count: int, begun: int | None = None, health: dict[str, str] = HEALTH, gpus: int = 0) -> RayMachines:
            begun = count if begun is None else begun
            made.append(RayMachines(make_machines(count), start, scratch, begun, health, gpus))
            return made[-1]

        yield make
        for cluster in made:
            for number in sorted(cluster.nodes, reverse=True):
                cluster.kill(number)


def wait_for_step(home: Path, step: int, command: Started) -> None:
    def events() -> str:
        return "".join(file.read_text() for file in home.glob("runs/*/events.jsonl"))

    poll(
        lambda: any(int(each) >= step for each in re.findall(r'checkpoint_saved", "step": (\d+)', events())), 120,
        lambda: command.output, lambda: command.process.poll() is not None,
    )  # fmt: skip


def first_save_with(home: Path, size: int) -> float:
    """Return the time of the first checkpoint, saved every five steps, of an attempt with `size` workers, or 0.0."""
    (path,) = home.glob("runs/*/events.jsonl")
    workers = 0
    for event in RunDirectory(path.parent).read_events():
        if event["event"] == "started":
            workers = event["world_size"]
        if event["event"] == "checkpoint_saved" and workers == size:
            return float(event["time"])
    return 0.0


def most_to_go_on(home: Path, launched: float, size: int) -> float:
    """Return in how many seconds after the loss of a node the others must have saved: 30, or, if the start of `size` workers at
    `launched` took longer than 20 because the machine is busy, that time and 10 more to detect the loss."""
    return max(30.0, first_save_with(home, size) - launched + 10)


def weights_of(output: str) -> str:
    return output.split("weights ")[1].split()[0]


def weights_on_one_machine(home: Path, run_cli: Callable[..., Any], processes: int = 2) -> str:
    """Return the weights of `processes` on one machine. Their run is moved out of the directory `runs`."""
    done = run_cli(["train", "--script", "train.py", "--nproc-per-node", str(processes)], cwd=home)
    assert done.returncode == 0, done.output
    (run,) = home.glob("runs/*")
    run.rename(home / f"expected-{processes}")
    return weights_of(done.stdout)


def command_of_the_page() -> list[str]:
    """Return the first command of docs/ray.md, for two nodes of one process."""
    page = (ROOT / "docs/ray.md").read_text()
    (line,) = re.findall(r"^python (-m distributed\.cli train .* --address ray://.*)$", page, re.M)
    for there, here in (("ray://head:10001", "10.99.0.1:6399"), ("4 --gpus-per-node 8", "2 --nproc-per-node 1")):
        assert there in line
        line = line.replace(there, here)
    return shlex.split(line)


def test_the_sample_of_the_page_trains_on_two_nodes_as_on_one_machine(
    ray_machines: Callable[..., RayMachines], run_python: Callable[..., Any]
) -> None:
    """With other numbers, and on CPUs."""
    (sample,) = re.findall(r"^```text\n(trainer = Trainer\(.*?)^```", (ROOT / "docs/ray.md").read_text(), re.M | re.S)
    asked = 'backend="ray", address="ray://head:10001", num_nodes=4, gpus_per_node=8'
    assert asked in sample
    cluster = ray_machines(2)
    home = cluster.machines.homes[0]
    there = 'backend="ray", address="10.99.0.1:6399", num_nodes=2, nproc_per_node=1, device="cpu"'
    for name, given in (("one.py", 'nproc_per_node=2, device="cpu"'), ("two.py", there)):
        (home / name).write_text(f"{MODEL}{sample.replace(asked, given)}{SHOW_WEIGHTS}")

    expected = run_python(["one.py"], cwd=home)
    done = cluster.run("two.py").finish(120, grace=20)

    assert done.returncode == 0 and weights_of(done.stdout) == weights_of(expected.stdout), done.output
    results = [json.loads(path.read_text()) for path in home.glob("runs/two-*/result.json")]
    assert [(each["backend"], each["num_nodes"], each["world_size"]) for each in results] == [("ray", 2, 2)]


@pytest.mark.cluster
def test_nodes_are_waited_for_and_a_lost_one_is_replaced(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any]
) -> None:
    """Both nodes have a host name that resolves to loopback. The run goes on bit for bit after a process was killed, and when a new
    node has joined."""
    cluster = ray_machines(2, begun=1)
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND)
    expected = weights_on_one_machine(home, run_cli)

    command = cluster.run(*command_of_the_page(), "--wait", "200")
    command.wait_for("waiting for resources: num_nodes=2 needs as many nodes with 1 CPU, but the Ray cluster at", 60)
    cluster.add(1)
    wait_for_step(home, 20, command)
    assert {(home / f"place-{rank}").read_text() for rank in (0, 1)} == {"node0 1 2\n", "node1 1 2\n"}
    os.kill(processes_of(cluster, 1)[0], signal.SIGKILL)
    wait_for_step(home, 40, command)
    cluster.kill(1)
    command.wait_for(
        "node1 left the Ray cluster, and num_nodes=2 needs as many nodes with 1 CPU, but the Ray cluster at", 60
    )
    cluster.add(1)
    done = command.finish(150, grace=20)
    assert done.returncode == 0 and weights_of(done.stdout) == expected, done.output
    found = re.findall(r"^warning: rank \d on (.*): restarting \((\d) of 3\)$", done.stderr, re.M)
    killed, cut = "node1 was killed by signal 9 (SIGKILL)", "node0 lost the connection to another rank"
    # If the news of a kill arrive late, the worker on the other node is the first to say something.
    assert [count for _, count in found] == ["1", "2"] and {what for what, _ in found} <= {killed, cut}, done.output
    (run,) = home.glob("runs/*")
    events = (run / "events.jsonl").read_text()
    assert events.count('"restarted"') == 2 and events.count('"node_lost"') == 1


@pytest.mark.cluster
@pytest.mark.full
def test_a_lost_node_without_a_replacement_and_a_node_that_differs_end_the_run_with_their_names(
    ray_machines: Callable[..., RayMachines],
) -> None:
    cluster = ray_machines(2)
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND)

    command = cluster.run(*command_of_the_page(), "--set", "node_timeout=5")
    wait_for_step(home, 20, command)
    cluster.kill(1)
    began = time.monotonic()
    done = command.finish(90, grace=20)
    assert done.returncode == 3 and time.monotonic() - began < 45, done.output
    last = "error: node1 left the Ray cluster, and no replacement came within node_timeout=5 s"
    assert done.stderr.splitlines()[-1] == last, done.output

    cluster.add(1, **other_version(cluster.machines.homes[1], "distributed-trainer", "9.9.9"))
    done = cluster.run(*command_of_the_page()).finish(60, grace=20)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 3 and re.match(
        r"error: the node of rank 1 \(node\d\) differs from that of rank 0: ", last
    ), last
    assert all(word in last for word in ("distributed-trainer", "9.9.9", "node0", "node1")), last


@pytest.mark.cluster
@pytest.mark.full
def test_a_machine_outside_of_the_cluster_trains_on_the_gpus_of_its_nodes(
    ray_machines: Callable[..., RayMachines],
) -> None:
    """The machine has no GPU and no Ray node. A node is killed and replaced while the script runs, which does not use the GPUs, as
    they do not exist."""
    cluster = ray_machines(3, begun=2, gpus=2)
    home = cluster.machines.homes[2]
    (home / "show.py").write_text(SHOW + WAIT)
    (home / "wait").touch()
    flags = ["--num-nodes", "2", "--gpus-per-node", "2", "--set", "ray.cpus_per_worker=0.5"]
    train = ["-m", "distributed.cli", "train", "--script", "show.py", "--backend", "ray", *flags]
    command = cluster.run(*train, "--address", "ray://10.99.0.1:10001", machine=2)

    def places() -> list[tuple[str, str]]:
        seen = "".join(path.read_text() for path in home.glob("runs/*/logs/rank-*.log"))
        return sorted(re.findall(r"saw (\d) (\d) 4 0,1$", seen, re.M))

    all_four = [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    command.wait_for(lambda: places() == all_four, 120)
    cluster.kill(1)
    lost = (
        "node1 left the Ray cluster, and num_nodes=2 needs as many nodes with 2 GPUs and 1 CPU, but the Ray cluster at"
    )
    command.wait_for(lost, 60)
    (home / "wait").unlink()
    cluster.add(1)
    done = command.finish(150, grace=20)
    assert done.returncode == 0 and places() == sorted(all_four * 2), done.output
    assert "nodes: 0 (node" in done.stdout
    done = cluster.run("-c", PLANNED, machine=2).finish(60, grace=20)
    assert done.stdout.split()[-5:] == ["2", "2", "4", "cuda", "ray"], done.output


@pytest.mark.cluster
@pytest.mark.full
def test_a_lost_head_ends_the_run(ray_machines: Callable[..., RayMachines]) -> None:
    """The command is on the head's machine, and only the processes of Ray are killed."""
    cluster = ray_machines(2)
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND.replace("epochs=4", "epochs=400"))
    train = [
        "-m",
        "distributed.cli",
        "train",
        "--script",
        "train.py",
        "--backend",
        "ray",
        "--address",
        "10.99.0.1:6399",
    ]
    command = cluster.run(*train, "--nproc-per-node", "2")
    wait_for_step(home, 5, command)
    began = time.monotonic()
    cluster.kill(0)
    done = command.finish(150, grace=20)

    assert done.returncode == 3 and time.monotonic() - began < 120, done.output
    said = "error: the Ray cluster at 10.99.0.1:6399 has ended before the run, for example because its head node was lost: see "
    assert done.stderr.splitlines()[-1].startswith(said), done.output


@pytest.mark.cluster
@pytest.mark.full
def test_a_plain_script_goes_on_with_the_workers_that_are_left(ray_machines: Callable[..., RayMachines]) -> None:
    cluster = ray_machines(2)
    home = cluster.machines.homes[0]
    (home / "plain.py").write_text(
        "import os, time\nsize = int(os.environ['WORLD_SIZE'])\nprint('begun with', size, flush=True)\ntime.sleep(600 * (size - 1))\n"
    )
    train = [
        "-m",
        "distributed.cli",
        "train",
        "--script",
        "plain.py",
        "--backend",
        "ray",
        "--address",
        "10.99.0.1:6399",
    ]
    command = cluster.run(*train, "--nproc-per-node", "1:2", "--max-restarts", "0")
    command.wait_for("begun with 2", 90)
    cluster.kill(1)
    done = command.finish(90, grace=20)

    assert done.returncode == 0 and "begun with 1" in done.stdout, done.output


@pytest.mark.cluster
@pytest.mark.full
def test_fit_in_code_takes_a_node_that_joins_and_moves_off_one_that_is_killed(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any]
) -> None:
    """The first run has one or two workers. The second has two, and its weights are those of one machine."""
    cluster = ray_machines(3, begun=1)
    home = cluster.machines.homes[0]
    (home / "fit.py").write_text(CODE)
    (home / "elastic.py").write_text(ELASTIC)
    (home / "train.py").write_text(COMMAND)
    expected = weights_on_one_machine(home, run_cli)

    command = cluster.run("elastic.py")
    wait_for_step(home, 5, command)
    assert first_save_with(home, 1)
    cluster.add(1)
    command.wait_for(lambda: first_save_with(home, 2), 60)
    command.signal(signal.SIGTERM)
    stopped = command.finish(60, grace=20)
    assert stopped.returncode == 143, stopped.output
    (run,) = home.glob("runs/*")
    started = [event["world_size"] for event in RunDirectory(run).read_events() if event["event"] == "started"]
    assert started == [1, 2], stopped.output
    run.rename(home / "grown")

    cluster.add(2)
    command = cluster.run("fit.py")
    wait_for_step(home, 20, command)
    lost = next(number for number in (1, 2) if processes_of(cluster, number))
    cluster.kill(lost)
    done = command.finish(150, grace=20)
    assert done.returncode == 0 and weights_of(done.stdout) == expected, done.output
    assert f"node{lost} left the Ray cluster: the workers start again on the other nodes" in done.output


@pytest.mark.cluster
@pytest.mark.parametrize("most", [3, pytest.param(4, marks=pytest.mark.full)])
def test_the_number_of_workers_follows_the_nodes(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any], most: int
) -> None:
    """The run follows all nodes, one less and one alone after kills, and all again. Without dropout the weights are those of one
    machine."""
    cluster = ray_machines(most)
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND.replace("Dropout(0.5)", "Dropout(0.0)").replace("epochs=4", "epochs=15"))
    expected = weights_on_one_machine(home, run_cli, most)

    flags = ["--nproc-per-node", f"1:{most}", "--max-restarts", "0", "--set", "elastic_interval_s=5"]
    train = ["train", "--script", "train.py", "--backend", "ray", "--address", "10.99.0.1:6399"]
    launched = time.time()
    command = cluster.run("-m", "distributed.cli", *train, *flags)
    wait_for_step(home, 20, command)
    limit_s = most_to_go_on(home, launched, most)
    began = time.time()
    cluster.kill(most - 1)
    command.wait_for(lambda: first_save_with(home, most - 1), 120)
    assert first_save_with(home, most - 1) - began <= limit_s, command.output
    wait_for_step(home, 60, command)
    began = time.time()
    for number in range(1, most - 1):
        cluster.kill(number)
    command.wait_for(lambda: first_save_with(home, 1), 120)
    assert first_save_with(home, 1) - began <= limit_s, command.output
    # Two seconds for each of 200 steps or more: the run must not end before the nodes have joined.
    (home / "linger").touch()
    for number in range(1, most):
        cluster.add(number)
    command.wait_for(f"going on with {most} processes", 120)
    (home / "hurry").touch()
    done = command.finish(150, grace=20)
    assert done.returncode == 0, done.output
    weights = [
        struct.unpack(f"<{len(text) // 16}d", bytes.fromhex(text)) for text in (weights_of(done.stdout), expected)
    ]
    assert max(abs(one - other) for one, other in zip(*weights, strict=True)) <= 1e-9, done.output
    (run,) = home.glob("runs/*")
    assert '"regrouped"' in (run / "events.jsonl").read_text()  # the workers saved before they were replaced


def two_nodes_with_the_checks_of_ray(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any]
) -> tuple[RayMachines, str]:
    """Return a cluster with the health checks that Ray has by default and a script, and the script's weights on one machine."""
    cluster = ray_machines(2, health={})
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND)
    return cluster, weights_on_one_machine(home, run_cli)


@pytest.mark.cluster
@pytest.mark.full
def test_a_gap_that_the_health_checks_of_ray_miss_changes_no_bit(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any]
) -> None:
    cluster, expected = two_nodes_with_the_checks_of_ray(ray_machines, run_cli)

    command = cluster.run(*command_of_the_page())
    wait_for_step(cluster.machines.homes[0], 20, command)
    cluster.machines.link(1, "down")
    time.sleep(20)  # the length of the gap
    cluster.machines.link(1, "up")
    done = command.finish(150, grace=20)

    assert done.returncode == 0 and weights_of(done.stdout) == expected, done.output
    assert "node1 does not answer, and" in done.stderr and "node1 answers again" in done.stdout, done.output


@pytest.mark.cluster
@pytest.mark.full
def test_a_network_that_loses_packets_changes_no_bit(
    ray_machines: Callable[..., RayMachines], run_cli: Callable[..., Any]
) -> None:
    cluster, expected = two_nodes_with_the_checks_of_ray(ray_machines, run_cli)

    for number in (0, 1):
        cluster.machines.lose(number, 5)
        cluster.machines.limit(number, "2mbit")
    done = cluster.run(*command_of_the_page()).finish(150, grace=20)

    assert done.returncode == 0 and weights_of(done.stdout) == expected, done.output
    assert min(cluster.machines.num_lost(each) for each in (0, 1)) > 5


@pytest.mark.cluster
@pytest.mark.full
def test_a_link_that_is_cut_holds_nobody_up(ray_machines: Callable[..., RayMachines]) -> None:
    """Ray's own checks notice it after a minute."""
    cluster = ray_machines(2, health={})
    home = cluster.machines.homes[0]
    (home / "train.py").write_text(COMMAND.replace("epochs=4", "epochs=100"))
    launched = time.time()
    command = cluster.run(
        "-m", "distributed.cli", "train", "--script", "train.py", "--backend", "ray", "--address", "10.99.0.1:6399", "--nproc-per-node",
        "1:2", "--max-restarts", "0", "--set", "elastic_interval_s=5",
    )  # fmt: skip
    wait_for_step(home, 20, command)
    cut = time.time()
    cluster.machines.link(1, "down")
    command.wait_for(lambda: first_save_with(home, 1), 120)
    assert first_save_with(home, 1) - cut <= most_to_go_on(home, launched, 2), command.output
    command.wait_for("node1 does not answer: the workers start again on the other nodes", 1)
    assert not processes_of(cluster, 1)
    command.signal(signal.SIGTERM)
    done = command.finish(60, grace=20)
    assert done.returncode == 143, done.output
    for number, run in enumerate(home.glob("runs/*")):
        run.rename(home / f"cut-{number}")

    cluster.kill(1)
    cluster.machines.link(1, "up")
    cluster.add(1)
    command = cluster.run(*command_of_the_page(), "--set", "node_timeout=5")
    wait_for_step(home, 20, command)
    cluster.machines.link(1, "down")
    done = command.finish(90, grace=20)
    assert done.returncode == 3, done.output
    last = "error: node1 does not answer, and no replacement came within node_timeout=5 s"
    assert done.stderr.splitlines()[-1] == last, done.output


def processes_of(cluster: RayMachines, number: int) -> list[int]:
    """Return the processes of the run that train on machine `number`."""
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in cluster.nodes[number].alive()}
    return [pid for pid, each in commands.items() if each.exists() and "_ray/process.py" in each.read_text()]
