"""Runs on several nodes that share no directory: what is lost and found again, and what ends the run with a line that names the node."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed.errors import ConfigError
from distributed.runs.listing import list_runs, read_state_of
from tests.conftest import Finished, Started, describe, needs_backend, patient, poll
from tests.machines import Machines, other_version

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
PORT = "29555"
SCRIPT = """
import os, sys, time
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.callbacks import Callback

class Wait(Callback):
    def on_step_end(self, state, result):
        time.sleep(float(os.environ.get("WAIT_S", "0")))

torch.manual_seed(0)
dtype = os.environ.get("DTYPE", "float64")
data = TensorDataset(torch.randn(320, 4, dtype=getattr(torch, dtype)), torch.randn(320, 1, dtype=getattr(torch, dtype)))
trainer = Trainer(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)),
    optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01), loss_fn=torch.nn.functional.mse_loss, dtype=dtype,
    epochs=4, global_batch_size=8, checkpoint_every_n_steps=10, callbacks=[Wait()],
)
trainer.fit(data)
if trainer.is_main_process:
    print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""

CODE = """
import os, sys
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

torch.manual_seed(0)
dtype = os.environ.get("DTYPE", "float64")
data = TensorDataset(torch.randn(64, 4, dtype=getattr(torch, dtype)), torch.randn(64, 1, dtype=getattr(torch, dtype)))
settings = {"loss_fn": torch.nn.functional.mse_loss, "dtype": dtype}
if os.environ["BACKEND"] == "deepspeed":
    settings["deepspeed"] = {"zero_stage": 1}

def new_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

def weights_of(model):
    return [p.detach().numpy() for p in model.parameters()]
"""
KERAS_CODE = """
import os, sys
import keras, numpy
from distributed import Trainer

keras.utils.set_random_seed(0)
inputs = numpy.random.default_rng(0).standard_normal((64, 4))
data = inputs, inputs.sum(1, keepdims=True)
settings = {"loss_fn": keras.losses.mean_squared_error, "optimizer": "adam"}

def new_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])

def weights_of(model):
    return [numpy.asarray(each) for each in model.get_weights()]
"""
FITS = """
nodes = {"num_nodes": 2, "node_rank": int(sys.argv[1]), "master_addr": "10.99.0.1", "nproc_per_node": 1} if sys.argv[1:] else {"nproc_per_node": 2}
for num_fits in map(int, os.environ["NUM_FITS"].split()):
    trainer = Trainer(
        new_model(), device="cpu", epochs=2, global_batch_size=8, backend=os.environ["BACKEND"], checkpoint_dir=os.environ.get("CHECKPOINTS"),
        **settings, **nodes,
    )
    for fit in range(num_fits):
        history = trainer.fit(data)
        weights = b"".join(each.tobytes() for each in weights_of(trainer.model)).hex()
        print("main:", trainer.is_main_process)
        print("result:", history.rows[-1]["epoch"], history.rows[-1]["step"], history.rows[-1]["loss"], weights)
"""

PLAIN = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", total.item(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""

KERAS = """
import os, time
import keras, numpy
from distributed import Trainer
from distributed.callbacks import Callback

class Wait(Callback):
    def on_step_end(self, state, result):
        time.sleep(float(os.environ.get("WAIT_S", "0")))

keras.utils.set_random_seed(0)
inputs = numpy.random.default_rng(0).standard_normal((320, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
trainer = Trainer(
    model, optimizer=keras.optimizers.Adam(0.01), loss_fn=keras.losses.mean_squared_error, epochs=4, global_batch_size=8,
    checkpoint_every_n_steps=10, callbacks=[Wait()],
)
trainer.fit((inputs, inputs.sum(1, keepdims=True)))
if trainer.is_main_process:
    print("weights", b"".join(numpy.asarray(each).tobytes() for each in trainer.model.get_weights()).hex())
"""


# Flags of the engines that train on several nodes.
ENGINES = {
    "pytorch-ddp": (),
    "fsdp": ("--checkpoint-dir", "SHARED"),  # each node writes a part of the weights
    "deepspeed": ("--set", "deepspeed.zero_stage=1"),  # has no float64
    "horovod": (),
    "tensorflow": (),
}


def of_engine(backend: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a test of what the launcher does on its own: `make test-cluster` runs it with one engine."""
    more = () if backend == "pytorch-ddp" else (pytest.mark.full,)
    return (pytest.mark.cluster, *more)


def error_of(ended: Finished) -> str:
    """Return the only error that a command printed."""
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    return line


class Job:
    """One command on each of several machines."""

    def __init__(
        self,
        machines: Machines,
        start: Callable[..., Started],
        *flags: str,
        wait_s: float = 0.0,
        begun: Sequence[int] | None = None,
        script: str = SCRIPT,
    ) -> None:
        self.machines, self._start, self._flags = machines, start, flags
        self._env = {"WAIT_S": str(wait_s)}
        for home in machines.homes:
            (home / "train.py").write_text(script)
        self.nodes = [self.begin(rank) for rank in (range(len(machines.homes)) if begun is None else begun)]

    def begin(self, rank: int, *more: str, **env: str) -> Started:
        """Start the command of node `rank`."""
        where = {
            "--num-nodes": str(len(self.machines.homes)),
            "--node-rank": str(rank),
            "--master-addr": "10.99.0.1",
            "--master-port": PORT,
        }
        own = [word for pair in where.items() for word in pair]
        return self._train(rank, ["--nproc-per-node", "1", *own, *self._flags, *more], env)

    def _train(self, number: int, flags: Sequence[str], env: dict[str, str]) -> Started:
        """Start `train` on a machine."""
        command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--device", "cpu"]
        return self._start([*self.machines.on(number), *command, *flags], env={**self._env, **env})

    def text(self, rank: int) -> str:
        """Return what node `rank` has printed so far."""
        return "".join(file.read_text() for file in self.nodes[rank]._files)

    def until_step(self, step: int) -> None:
        """Wait until node 0 has trained `step` updates and saved a checkpoint before."""
        poll(
            lambda: any(int(each) >= step for each in re.findall(r"checkpoint_saved\", \"step\": (\d+)", self._events())), 90,
            lambda: "\n".join(map(self.text, range(len(self.nodes)))), lambda: self.nodes[0].process.poll() is not None,
        )  # fmt: skip

    def _events(self) -> str:
        return "".join(file.read_text() for file in self.machines.homes[0].glob("runs/*/events.jsonl"))

    def worker(self, rank: int) -> int:
        """Return the process id of the worker of node `rank`: the newest process of its launcher."""
        return self.nodes[rank].alive()[-1]

    def weights(self) -> str:
        """Wait for the end of all nodes and return the weights that node 0 printed."""
        ended = [node.finish(150) for node in self.nodes]
        assert [each.returncode for each in ended] == [0] * len(ended), "\n".join(each.output for each in ended)
        return ended[0].stdout.split("weights ")[1].split()[0]


class JobByRank(Job):
    """A worker on each of several machines. It does not know that the others are on other machines."""

    def begin(self, rank: int, *more: str, **env: str) -> Started:
        who = ["--world-size", str(len(self.machines.homes)), "--rank", str(rank), "--master-addr", "10.99.0.1"]
        return self._train(rank, [*who, "--master-port", PORT, *self._flags, *more], env)


def check_what_node_1_knows(job: Job, start: Callable[..., Started]) -> None:
    """Check the state of a run that node 1 shows after it went on three times."""
    (part,) = job.machines.homes[1].glob("runs/*")
    count, command = len(job.nodes), [sys.executable, "-m", "distributed.cli", "status", "--once", f"runs/{part.name}"]
    shown = start([*job.machines.on(1), *command]).finish(30).stdout
    for line in (
        r"part +node 1 of a run of 10\.99\.0\.1: node 0 has the metrics, the\n +checkpoints and the events of all nodes",
        "status +finished", "backend +fsdp", rf"processes +{count} on {count} nodes", rf"logs +rank 1, in runs/{part.name}/logs",
        "step +160, when this node last saved or ended", "restarts +3",
    ):  # fmt: skip
        assert re.search(rf"^  {line}$", shown, re.M), shown


@pytest.fixture(scope="module")
def expected(run_cli_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return a function that returns the weights of a run on one machine with a number of processes."""
    found: dict[int, str] = {}

    def weights(processes: int) -> str:
        if processes not in found:
            home = tmp_path_factory.mktemp("one")
            (home / "train.py").write_text(SCRIPT)
            done = run_cli_once(
                ["train", "--script", "train.py", "--device", "cpu", "--nproc-per-node", processes], cwd=home
            )
            found[processes] = done.stdout.split("weights ")[1].split()[0]
        return found[processes]

    return weights


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.cluster)])
def test_nodes_without_a_shared_directory_train_as_one_machine(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    expected: Callable[[int], str],
    count: int,
) -> None:
    job = Job(make_machines(count), start)

    assert job.weights() == expected(count)

    runs = [list(home.glob("runs/*")) for home in job.machines.homes]
    assert [len(each) for each in runs] == [1] * count and len({each[0].name for each in runs}) == 1
    assert [sorted(path.name for path in each[0].glob("logs/*")) for each in runs] == [
        [f"rank-{rank}.log"] for rank in range(count)
    ]


@pytest.mark.cluster
def test_workers_started_by_rank_on_machines_of_their_own_go_on_bit_for_bit(
    make_machines: Callable[[int], Machines], start: Callable[..., Started], expected: Callable[[int], str]
) -> None:
    """Dropout draws from the generator of each rank."""
    script = f'{SCRIPT}trainer.save("saved")\n'
    job = JobByRank(make_machines(2), start, "--run-dir", "runs/mine", wait_s=0.05, script=script)
    job.until_step(30)
    for each in job.nodes:
        each.process.kill()
        each.process.wait()

    job.nodes = [job.begin(rank, "--resume", WAIT_S="0") for rank in (0, 1)]

    assert job.weights() == expected(2)
    (first,) = re.findall(r'"event": "resumed", .*?"step": (\d+)', job._events())
    assert int(first) >= 30
    assert [path.name for path in (job.machines.homes[0] / "saved").iterdir()] == ["step-00000160"]
    assert not [file for home in job.machines.homes for file in home.rglob(".main-*")]


@pytest.mark.parametrize(
    ("leads_to", "master"),
    [("loopback", "node0"), pytest.param("another network", "10.99.0.1", marks=pytest.mark.cluster)],
)
def test_a_plain_script_finds_gloo_on_machines_whose_own_names_lead_elsewhere(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    leads_to: str,
    master: str,
) -> None:
    machines = make_machines(2)
    for number, home in enumerate(machines.homes):
        (home / "plain.py").write_text(PLAIN)
        if leads_to == "another network":
            machines.add_network(number)

    nodes = [
        start([
            *machines.on(rank), sys.executable, "-m", "distributed.cli", "train", "--script", "plain.py", "--device", "cpu", "--nproc-per-node", "1",
            "--nnodes", "2", "--node-rank", str(rank), "--rdzv-endpoint", f"{master}:{PORT}",
        ])
        for rank in (0, 1)
    ]  # fmt: skip
    ended = [node.finish(120) for node in nodes]

    assert [each.returncode for each in ended] == [0, 0], ended[0].output + ended[1].output
    (log,) = machines.homes[1].glob("runs/*/logs/rank-1.log")
    assert "total 2.0 eth0" in ended[0].stdout and "total 2.0 eth0" in log.read_text()


@pytest.mark.parametrize(
    ("backend", "num_fits"),  # of each Trainer, one after the other
    [
        ("pytorch-ddp", [1]),
        pytest.param("pytorch-ddp", [2, 1], marks=(pytest.mark.cluster, pytest.mark.full)),
        *(pytest.param(each, [1], marks=of_engine(each)) for each in ENGINES if each != "pytorch-ddp"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(map(str, value)),
)
def test_fit_in_code_trains_on_both_nodes_and_gives_both_callers_the_weights(
    make_machines: Callable[..., Machines],
    start: Callable[..., Started],
    tmp_path: Path,
    backend: str,
    num_fits: list[int],
) -> None:
    needs_backend(backend)
    machines = make_machines(2, are_names_loopback=backend != "horovod")
    for home in machines.homes:
        (home / "fit.py").write_text((KERAS_CODE if backend == "tensorflow" else CODE) + FITS)
    command, env = [sys.executable, "fit.py"], {"BACKEND": backend, "NUM_FITS": " ".join(map(str, num_fits))}
    if backend == "tensorflow":
        env["KERAS_BACKEND"] = "tensorflow"
    if backend == "deepspeed":
        env["DTYPE"] = "float32"
    alone = start([*machines.on(0), *command], env=env)

    expected = [line for line in alone.finish(patient(100)).stdout.splitlines() if line.startswith("result:")]
    if backend == "fsdp":  # each node writes a part of the weights
        env["CHECKPOINTS"] = str(tmp_path / "shared")
    both = [start([*machines.on(rank), *command, str(rank)], env=env) for rank in (0, 1)]
    ended = [node.finish(200) for node in both]

    assert len(expected) == sum(num_fits)
    for each in ended:
        assert [line for line in each.stdout.splitlines() if line.startswith("result:")] == expected, each.output
    assert [set(re.findall(r"main: (\w+)", each.stdout)) for each in ended] == [{"True"}, {"False"}]
    names = [{path.name for path in home.glob("runs/*")} for home in machines.homes]
    assert len(names[1]) == 1 and names[1] < names[0]


@pytest.mark.cluster
def test_a_killed_worker_of_another_node_goes_on_bit_for_bit(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    expected: Callable[[int], str],
) -> None:
    job = Job(make_machines(2), start, "--nproc-per-node", "2", wait_s=0.03)
    job.until_step(40)
    (part,) = job.machines.homes[1].glob("runs/*")
    status = [sys.executable, "-m", "distributed.cli", "status", f"runs/{part.name}"]
    following = start([*job.machines.on(1), *status])
    following.wait_for("status      running", 30)
    os.kill(job.worker(1), signal.SIGKILL)

    assert job.weights() == expected(4)
    followed = following.finish(30).stdout.splitlines()
    assert followed[-1] == "finished at step 160", followed
    assert sum("  worker failed  " in line and "SIGKILL" in line for line in followed) == 1, followed
    assert job._events().count('"restarted"') == 1
    failed = [json.loads(line) for line in job._events().splitlines() if "SIGKILL" in line]
    assert [(each["event"], each["node"]) for each in failed] == [("worker_failed", 1)], failed
    killed = rf"warning: {re.escape(failed[0]['cause'])}"  # on both consoles
    assert re.search(killed, job.text(0)) and re.search(killed, job.text(1)), job.text(0) + job.text(1)
    assert job.text(0).count("nodes: 0 (node0), 1 (node1)\n") == 1
    with pytest.raises(
        ConfigError, match=r"has the logs of node 1 of a run of \S+: run this command on node 0"
    ):  # it is no run of its own
        list_runs(part)
    assert list_runs(part.parent) == []


@pytest.mark.cluster
def test_ctrl_c_on_one_node_ends_all_after_a_checkpoint_and_a_resume_goes_on_bit_for_bit(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    expected: Callable[[int], str],
) -> None:
    job = Job(make_machines(2), start, wait_s=0.03)
    job.until_step(20)
    job.nodes[1].signal(signal.SIGINT)

    ended = [node.finish(60) for node in job.nodes]

    assert [each.returncode for each in ended] == [130, 130], ended[0].output + ended[1].output
    assert "SIGINT: stopping" in ended[1].output and "run-dir ''" not in ended[1].output
    (run,) = job.machines.homes[0].glob("runs/*")
    assert f"--run-dir runs/{run.name} --resume" in ended[0].output
    job.nodes = [job.begin(0, "--run-dir", f"runs/{run.name}", "--resume"), job.begin(1)]
    assert job.weights() == expected(2)


@pytest.mark.cluster
@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp"])
def test_machines_that_have_nothing_resume_from_object_storage_bit_for_bit(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    run_cli: Callable[..., Any],
    tmp_path: Path,
    backend: str,
) -> None:
    """Only node 0 uses the storage. It gathers the parts of the other node, and sends it the checkpoint."""
    pytest.importorskip("fsspec", reason="object storage needs fsspec")
    (tmp_path / "train.py").write_text(SCRIPT)
    flags = ["--device", "cpu", "--nproc-per-node", "2", "--backend", backend]
    alone = run_cli(["train", "--script", "train.py", *flags], cwd=tmp_path)
    flags = ["--run-dir", f"file://{tmp_path}/storage/mine", "--backend", backend]
    job = Job(make_machines(2), start, *flags, wait_s=0.03)
    job.until_step(20)
    job.nodes[0].signal(signal.SIGTERM)
    ended = [node.finish(60) for node in job.nodes]
    assert [each.returncode for each in ended] == [143, 143], ended[0].output + ended[1].output
    assert f"--run-dir file://{tmp_path}/storage/mine --resume" in ended[0].output
    for home in job.machines.homes:
        shutil.rmtree(home / "runs")

    job.nodes = [job.begin(0, "--resume"), job.begin(1)]

    assert job.weights() == alone.stdout.split("weights ")[1].split()[0]
    assert "resumed from step-" in job.text(0)


@pytest.mark.cluster
def test_a_plain_script_that_is_stopped_on_one_node_ends_on_the_other_too(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    job = Job(
        make_machines(2), start, script=PLAIN + "\nfor _ in range(3000): dist.all_reduce(total); time.sleep(0.1)\n"
    )
    job.nodes[0].wait_for("total 2.0", 90)
    job.nodes[1].signal(signal.SIGINT)

    ended = [node.finish(60) for node in job.nodes]

    assert [each.returncode for each in ended] == [130, 130], ended[0].output + ended[1].output
    assert "error: node 1 (node1, 10.99.0.2) was stopped by SIGINT, so the workers" in ended[0].output


@pytest.mark.cluster
@pytest.mark.full
def test_a_script_may_end_with_an_action_of_the_main_process_if_the_network_loses_packets(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    """Node 0 hosts the store in which the others read that its action is over."""
    machines = make_machines(3)
    for number in range(3):
        machines.lose(number, 20)
    script = SCRIPT.replace("epochs=4", "epochs=1") + "with trainer.main_process_first():\n    pass\n"

    ended = [node.finish(150) for node in Job(machines, start, script=script).nodes]

    assert [each.returncode for each in ended] == [0] * 3, "\n".join(each.output for each in ended)


@pytest.fixture
def begin(
    make_machines: Callable[..., Machines],
    start: Callable[..., Started],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Job]:
    """Return a function that starts a run of an engine on several machines. `hinder` is called with the machines before."""

    def begin(backend: str, count: int, *more: str, hinder: Callable[[Machines], None] = lambda _: None) -> Job:
        needs_backend(backend)
        monkeypatch.setenv("DTYPE", "float32" if backend == "deepspeed" else "float64")
        machines = make_machines(count, are_names_loopback=backend != "horovod")
        hinder(machines)
        flags = [str(tmp_path / "shared") if each == "SHARED" else each for each in ENGINES[backend]]
        script = KERAS if backend == "tensorflow" else SCRIPT
        return Job(machines, start, "--backend", backend, *flags, *more, wait_s=0.03, script=script)

    return begin


@pytest.mark.parametrize(
    ("backend", "count"),
    [
        ("fsdp", 2),
        *(
            pytest.param(each, 2, marks=(pytest.mark.cluster, pytest.mark.full))
            for each in ("pytorch-ddp", "deepspeed", "horovod", "tensorflow")
        ),
        *(
            pytest.param(each, 3, marks=(pytest.mark.cluster, pytest.mark.full))
            for each in ("fsdp", "deepspeed", "tensorflow")
        ),
    ],
)
def test_every_engine_goes_on_bit_for_bit_on_several_nodes(
    begin: Callable[..., Job],
    start: Callable[..., Started],
    run_cli: Callable[..., Any],
    tmp_path: Path,
    backend: str,
    count: int,
) -> None:
    """With 5 % loss and 500 kbit/s, a worker is killed, then a node is killed and replaced, then a link is down for 20 s."""

    def hinder(machines: Machines) -> None:
        for number in range(count):
            machines.lose(number, 5)
            machines.limit(number, "500kbit")

    job = begin(backend, count, hinder=hinder)
    job.until_step(20)
    os.kill(job.worker(1), signal.SIGKILL)
    poll(lambda: '"resumed"' in job._events(), 60, lambda: job.text(0))
    job.until_step(50)
    killed = job.nodes[1]
    os.kill(killed.pid, signal.SIGKILL)
    poll(lambda: "waiting 120 s for it or its replacement" in job.text(0), 20, lambda: job.text(0))
    assert "node 1 (node1, 10.99.0.2) has ended" in job.text(0)
    (run,) = job.machines.homes[0].glob("runs/*")
    assert read_state_of(run).status == "running"  # although its own worker has lost the connection
    poll(lambda: not killed.alive(), 10, lambda: describe(killed.alive()))
    job.nodes[1] = job.begin(1)
    poll(lambda: "node 1 (node1, 10.99.0.2) has joined again" in job.text(0), 60, lambda: job.text(0))
    job.until_step(80)
    job.machines.link(1, "down")
    time.sleep(20)
    job.machines.link(1, "up")

    weights = job.weights()
    (tmp_path / "train.py").write_text(KERAS if backend == "tensorflow" else SCRIPT)
    flags = () if backend == "fsdp" else ENGINES[backend]
    alone = run_cli(
        ["train", "--script", "train.py", "--backend", backend, "--device", "cpu", "--nproc-per-node", count, *flags],
        cwd=tmp_path,
    )
    assert weights == alone.stdout.split("weights ")[1].split()[0]
    joined = re.findall(r'"event": "(node_\w+)", "node": 1', job._events())
    assert joined == ["node_lost", "node_joined"] * 2, joined
    lost, delayed = ([count(each) for each in (0, 1)] for count in (job.machines.num_lost, job.machines.num_delayed))
    assert min(lost) > 5 and max(delayed) > 5, (lost, delayed)  # packets
    if backend == "fsdp":  # the logs of the other nodes came through the directory of the checkpoints
        for node in range(1, count):
            (own,) = job.machines.homes[node].glob(f"runs/*/logs/rank-{node}.log")
            assert (run / f"logs/node-{node}/rank-{node}.log").read_text() == own.read_text()
        assert not [*(tmp_path / "shared").glob(".logs-*"), *(tmp_path / "shared").glob(".main-*")]
        check_what_node_1_knows(job, start)


@pytest.mark.parametrize(
    ("backend", "flags", "kind"),
    [
        ("fsdp", [], Job),
        pytest.param("fsdp", [], JobByRank, marks=pytest.mark.cluster),
        pytest.param(
            "deepspeed", ["--set", "deepspeed.zero_stage=3"], Job, marks=[pytest.mark.cluster, pytest.mark.full]
        ),
    ],
)
def test_a_sharded_save_without_a_shared_directory_is_refused_before_training(
    make_machines: Callable[..., Machines],
    start: Callable[..., Started],
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    flags: list[str],
    kind: type[Job],
) -> None:
    needs_backend(backend)
    monkeypatch.setenv("DTYPE", "float32" if backend == "deepspeed" else "float64")
    job = kind(make_machines(2), start, "--backend", backend, *flags)

    ended = [node.finish(60) for node in job.nodes]

    assert [each.returncode for each in ended] == [2, 2]
    for each in ended:
        assert f"error: {backend} saves a part of the weights on every node, and the nodes do not share" in each.stderr
        assert "set checkpoint_dir (or --run-dir) to a directory on a file system that all nodes share" in each.stderr
    assert "step" not in ended[0].stdout
    assert not [file for home in job.machines.homes for file in home.rglob(".main-*")]


@pytest.mark.cluster
@pytest.mark.parametrize("backend", [pytest.param(each, marks=of_engine(each)) for each in ENGINES])
def test_the_end_of_node_0_is_named_on_the_others(begin: Callable[..., Job], backend: str) -> None:
    job = begin(backend, 2)
    job.until_step(20)
    os.kill(job.nodes[0].pid, signal.SIGKILL)

    ended = job.nodes[1].finish(40)

    assert ended.returncode == 1
    assert error_of(ended) == "error: node 0 (10.99.0.1) is lost: its launcher has ended"
    poll(lambda: not job.nodes[0].alive(), 10, lambda: describe(job.nodes[0].alive()))


@pytest.mark.parametrize(
    "backend",
    ["pytorch-ddp", *(pytest.param(each, marks=of_engine(each)) for each in ENGINES if each != "pytorch-ddp")],
)
def test_a_link_that_stays_down_ends_both_nodes_in_time_and_names_the_other(
    begin: Callable[..., Job], backend: str
) -> None:
    job = begin(backend, 2, "--set", "node_timeout=5")
    job.until_step(20)
    cut = time.time()
    job.machines.link(1, "down")

    ended = [node.finish(60) for node in job.nodes]

    assert [each.returncode for each in ended] == [1, 1]
    (lost,) = [each for each in map(json.loads, job._events().splitlines()) if each["event"] == "node_lost"]
    assert lost["time"] - cut <= 11, lost
    assert "node 1 (node1, 10.99.0.2) has been silent for 10 s" in ended[0].output
    assert error_of(ended[0]) == "error: node 1 (node1, 10.99.0.2) did not come back within 5 s (node_timeout)"
    assert error_of(ended[1]) == "error: node 0 (10.99.0.1) is lost: it did not answer for 5 s (node_timeout)"


@pytest.mark.cluster
def test_a_node_that_never_comes_is_named(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    # On a busy machine, node 0 starts many seconds after node 1.
    job = Job(make_machines(3), start, "--set", "start_timeout=20")
    job.nodes[2].kill()

    ended = [node.finish(100) for node in job.nodes[:2]]

    assert [each.returncode for each in ended] == [1, 1]
    assert all(error_of(each).startswith("error: node 2 did not join within 20 s (start_timeout)") for each in ended)


@pytest.mark.cluster
def test_a_node_rank_given_twice_refuses_the_second_command_only(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    expected: Callable[[int], str],
) -> None:
    machines = make_machines(2)
    hold = machines.homes[0] / "hold"  # the run stays in an update while this file is there
    hold.touch()
    waiting = 'while state.step == 20 and os.path.exists("hold"):\n            time.sleep(0.05)'
    job = Job(machines, start, script=SCRIPT.replace('time.sleep(float(os.environ.get("WAIT_S", "0")))', waiting))
    job.until_step(10)

    second = job.begin(1).finish(40)
    hold.unlink()

    assert second.returncode == 1 and "node_rank=1 is taken by node1, 10.99.0.2" in error_of(second)
    assert job.weights() == expected(2)


@pytest.mark.cluster
def test_a_wrong_address_is_named(make_machines: Callable[[int], Machines], start: Callable[..., Started]) -> None:
    job = Job(make_machines(2), start, "--set", "start_timeout=4", begun=())

    ended = job.begin(1, "--master-addr", "10.99.0.77").finish(40)

    assert ended.returncode == 1
    assert re.search(
        r"node 0 did not answer at 10.99.0.77:29555 within 4 s \(start_timeout\).*check master_addr", error_of(ended)
    )


@pytest.mark.cluster
def test_a_port_that_is_taken_on_node_0_is_named_and_both_nodes_end(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    machines = make_machines(2)
    code = f"import socket, time; taken = socket.create_server(('10.99.0.1', {PORT})); print('taken', flush=True); time.sleep(600)"
    other = start([*machines.on(0), sys.executable, "-c", code])
    other.wait_for("taken")
    job = Job(machines, start, "--set", "start_timeout=8")

    ended = [node.finish(40) for node in job.nodes]  # which fails if a process is left

    assert [each.returncode for each in ended] == [3, 1], ended[0].output + ended[1].output
    assert ended[0].stderr == (
        f"error: master_port={PORT} cannot be listened on (Address already in use): name another on every node\n"
    )
    assert error_of(ended[1]).startswith(f"error: node 0 did not answer at 10.99.0.1:{PORT} within 8 s (start_timeout)")
    assert other.alive() and not list(machines.homes[1].glob("runs/*"))


@pytest.mark.cluster
def test_a_failure_of_the_script_on_one_node_is_shown_on_all(
    make_machines: Callable[[int], Machines],
    start: Callable[..., Started],
    run_cli: Callable[..., Any],
) -> None:
    script = "import os\nif 'FAILS' in os.environ: raise ValueError('only here')\n" + SCRIPT
    job = Job(make_machines(2), start, begun=(), script=script)

    ended = [node.finish(60) for node in [job.begin(0), job.begin(1, FAILS="1")]]

    assert [each.returncode for each in ended] == [1, 1]
    assert "ValueError: only here" in ended[1].output and "Traceback" in ended[1].output
    assert "rank 1 on node 1 (node1) failed with ValueError: only here" in ended[0].output, ended[0].output
    shown = run_cli(["status", str(next(job.machines.homes[0].glob("runs/*")))])
    assert "error       rank 1 on node 1 (node1) failed with ValueError: only here" in shown.stdout, shown.output


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["distributed-trainer", "torch"])
def test_a_node_with_another_version_is_refused_and_both_versions_are_named(
    make_machines: Callable[[int], Machines], start: Callable[..., Started], name: str
) -> None:
    job = Job(make_machines(2), start, begun=())
    env = {} if name == "torch" else other_version(job.machines.homes[1], name, "9.9.9")
    if name == "torch":  # its version is an attribute of the module
        (job.machines.homes[1] / "sitecustomize.py").write_text("import torch\ntorch.__version__ = '9.9.9'\n")
        env = {"PYTHONPATH": str(job.machines.homes[1])}

    node_1 = job.begin(1, "--set", "start_timeout=60", **env)
    node_1.wait_for("waiting 60 s for node 0")  # so that it comes before node 0 gives up, also on a busy machine
    node_0 = job.begin(0, "--set", "start_timeout=10")
    refused, waited = node_1.finish(100), node_0.finish(100)

    assert [waited.returncode, refused.returncode] == [1, 1]
    assert re.search(
        rf"node 1 \(node1, 10.99.0.2\) differs from node 0: {name} 9.9.9 there and \S+ on node 0", error_of(refused)
    )
    assert re.search(rf"warning: node 1 .* was refused: .*{name} 9.9.9 there", waited.output), waited.output
    assert "node 1 did not join within 10 s" in error_of(waited)


@pytest.mark.cluster
def test_doctor_names_the_node_that_differs(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    machines = make_machines(3)
    machines.limit(2, "50mbit")
    env = other_version(machines.homes[1], "numpy", "1.0")
    flags = ["--num-nodes", "3", "--master-addr", machines.addresses[0]]

    nodes = [
        start(
            [*machines.on(rank), sys.executable, "-m", "distributed.cli", "doctor", "--node-rank", str(rank), *flags],
            env=env if rank == 1 else {},
        )
        for rank in range(3)
    ]
    ended = [node.finish(150) for node in nodes]

    assert [each.returncode for each in ended] == [3, 3, 3], ended[0].output
    for each in ended:
        assert re.search(r"^ok +node 0 +node0 \(10.99.0.1\), interface eth0, \d+ cores, no GPU$", each.stdout, re.M), (
            each.output
        )
        assert re.search(
            r"^bad +node 1 \(node1\) +numpy is 1.0 here and \S+ on nodes 0, 2: install", each.stdout, re.M
        ), each.output
        assert re.search(
            r"^bad +node 2 \(node2\) +its pairs reach at most [\d.]+ MB/s, the others", each.stdout, re.M
        ), each.output
        assert re.search(r"^ok +clocks +at most", each.stdout, re.M)
        assert each.stdout.endswith("wrong: node 1 (node1), node 2 (node2)\n")
        assert len(re.findall(r"^info +all-reduce \d-\d ", each.stdout, re.M)) == 3
    assert all(not list(home.glob("runs")) for home in machines.homes)


@pytest.mark.parametrize("verb", [pytest.param("train", marks=pytest.mark.cluster), "doctor"])
def test_the_commands_of_the_page_run(
    make_machines: Callable[..., Machines], start: Callable[..., Started], verb: str
) -> None:
    machines = make_machines(2)
    commands = re.findall(
        rf"^python (-m distributed.cli {verb} .*--node-rank \d.*)$", (ROOT / "docs/many-nodes.md").read_text(), re.M
    )
    for home in machines.homes:
        (home / "examples").symlink_to(ROOT / "examples")

    nodes = [
        start([*machines.on(rank), sys.executable, *shlex.split(command)]) for rank, command in enumerate(commands)
    ]
    ended = [node.finish(200) for node in nodes]

    assert [each.returncode for each in ended] == [0, 0], ended[0].output + ended[1].output
    assert ("held-out accuracy 0.9" if verb == "train" else "the nodes agree") in ended[0].stdout
