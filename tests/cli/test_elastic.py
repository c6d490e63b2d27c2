"""Runs whose number of processes changes: killed workers, nodes that go and come, with the weights of a run in which none is missing."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Started, describe, needs_backend
from tests.machines import Machines

pytestmark = pytest.mark.timeout(600)
PORT = "29556"
# float64 and no dropout, so that the split of a batch changes only the rounding. 330 samples in batches of 8: the last one is short.
SCRIPT = """
import os, time
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.callbacks import Callback

dtype = getattr(torch, os.environ.get("DTYPE", "float64"))

class Slow(Callback):
    def on_step_end(self, state, result):
        time.sleep(float(os.environ.get("WAIT_S", "0")))
        if os.environ["RANK"] == "0":
            print("step", state.step, "of", os.environ["WORLD_SIZE"], "samples", state.samples_seen, flush=True)

class Numbered(torch.utils.data.Dataset):
    def __len__(self):
        return 330
    def __getitem__(self, index):
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{index}\\n")
        return inputs[index], inputs[index].sum(0, keepdim=True).sin()

torch.manual_seed(0)
inputs = torch.randn(330, 4, dtype=torch.float64).to(dtype)
trainer = Trainer(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
    optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9), loss_fn=torch.nn.functional.mse_loss,
    dtype=str(dtype).partition(".")[2], epochs=3, global_batch_size=8, checkpoint_every_n_steps=10, callbacks=[Slow()],
)
trainer.fit(Numbered())
if trainer.is_main_process:
    print("weights", *(float(w) for p in trainer.model.parameters() for w in p.detach().flatten()))
"""
KERAS = """
import os, time
import keras, numpy
from distributed import Trainer
from distributed.callbacks import Callback

class Slow(Callback):
    def on_step_end(self, state, result):
        time.sleep(float(os.environ.get("WAIT_S", "0")))
        if os.environ["RANK"] == "0":
            print("step", state.step, "of", os.environ["WORLD_SIZE"], flush=True)

keras.utils.set_random_seed(0)
keras.config.set_floatx("float64")
inputs = numpy.random.default_rng(0).standard_normal((330, 4))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
trainer = Trainer(
    model, optimizer=keras.optimizers.SGD(0.01, momentum=0.9), loss_fn=keras.losses.mean_squared_error, dtype="float64",
    epochs=3, global_batch_size=8, checkpoint_every_n_steps=10, callbacks=[Slow()],
)
trainer.fit((inputs, numpy.sin(inputs.sum(1, keepdims=True))))
if trainer.is_main_process:
    print("weights", *(float(w) for each in trainer.model.get_weights() for w in each.flatten()))
"""
SECRET = "0123456789abcdef0123456789abcdef"
GO_ON_S = 30  # in which the others train a step after a worker or node was killed, or a node was told to leave
LIMITS = {"deepspeed": 1e-6}  # its engine has no float64


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py", "--device", "cpu", *flags]


def with_nodes(count: str) -> list[str]:
    """Return the command of docs/elastic.md for several nodes, with this many nodes of one process on the CPU."""
    page = (Path(__file__).resolve().parents[2] / "docs/elastic.md").read_text()
    (line,) = re.findall(r"^python (-m distributed\.cli train .*--nnodes .*)$", page, re.M)
    for there, here in (
        ("examples/train.py", "train.py"), ("--nproc-per-node 8", "--nproc-per-node 1 --device cpu"), ("1:4", count),
        ("node0:29500", f"10.99.0.1:{PORT}"),
    ):  # fmt: skip
        assert there in line
        line = line.replace(there, here)
    return [sys.executable, *shlex.split(line)]


def weights_of(text: str) -> list[float]:
    return [float(word) for word in re.findall(r"^weights (.*)$", text, re.MULTILINE)[-1].split()]


def off(ones: list[float], others: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(one - other) for one, other in zip(ones, others, strict=True))


def sizes_of(text: str) -> list[int]:
    """Return the numbers of processes in the order in which the run had them."""
    found = [int(each) for each in re.findall(r"^backend \S+, (\d+) process", text, re.MULTILINE)]
    return [size for index, size in enumerate(found) if index == 0 or size != found[index - 1]]


@pytest.fixture
def unchanged(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, int], list[float]]:
    """Return a function that returns the weights of a run in which no process is missing."""

    def weights(backend: str, processes: int) -> list[float]:
        monkeypatch.setenv("SEEN", os.devnull)
        monkeypatch.setenv("DTYPE", "float32" if backend == "deepspeed" else "float64")
        (tmp_path / "train.py").write_text(KERAS if backend == "tensorflow" else SCRIPT)
        done = run_cli([*command("--backend", backend)[3:], "--nproc-per-node", processes], cwd=tmp_path)
        return weights_of(done.stdout)

    return weights


@pytest.mark.parametrize(
    "backend",
    [
        "pytorch-ddp",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("fsdp", "deepspeed", "horovod", "tensorflow")),
    ],
)
def test_killed_workers_are_missing_until_the_interval_is_over(
    start: Callable[..., Started], unchanged: Callable[[str, int], list[float]], tmp_path: Path, backend: str
) -> None:
    """4 processes, 3 after a kill, 1 after two kills at once or one after the other, then 4."""
    needs_backend(backend)
    expected = unchanged(backend, 4)
    run = start(
        command("--backend", backend, "--nproc-per-node", "1:4", "--set", "elastic_interval_s=8"), cwd=tmp_path,
        env={"WAIT_S": "0.1", "SEEN": str(tmp_path / "seen"), "DTYPE": "float32" if backend == "deepspeed" else "float64"},
    )  # fmt: skip
    run.wait_for("step 12 of 4", 120)
    os.kill(run.alive()[-1], signal.SIGKILL)
    run.wait_for("of 3", GO_ON_S)
    for pid in run.alive()[-2:]:
        os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda: re.search(r"going on with [12] process", run.output), GO_ON_S)
    if "going on with 2 processes" in run.output:  # the second worker was still alive when the first one was noticed
        run.wait_for("of 2", GO_ON_S)
        os.kill(run.alive()[-1], signal.SIGKILL)
    run.wait_for("of 1 samples" if backend != "tensorflow" else "of 1\n", GO_ON_S)
    ended = run.finish(200)

    assert ended.returncode == 0, ended.output
    sizes = sizes_of(ended.stdout)
    assert [size for size in sizes if size != 2] == [4, 3, 1, 4], ended.output
    assert "going on with 3 processes" in ended.stderr and "going on with 4 processes" in ended.stdout
    assert off(weights_of(ended.stdout), expected) <= LIMITS.get(backend, 1e-9), ended.output


def test_each_sample_is_seen_once_in_an_epoch_that_another_number_of_processes_finishes(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("epochs=3", "epochs=1"))
    run = start(
        command("--nproc-per-node", "1:2", "--set", "elastic_interval_s=1.5"), cwd=tmp_path,
        env={"WAIT_S": "0.1", "SEEN": str(tmp_path / "seen")},
    )  # fmt: skip
    run.wait_for("step 12 of 2", 60)
    os.kill(run.alive()[-1], signal.SIGKILL)
    run.wait_for("of 1 samples", GO_ON_S)
    (config,) = tmp_path.glob("runs/*/config.yaml")
    assert "gradient_accumulation_steps: 1 " in config.read_text()  # with all processes, not with those that are left
    ended = run.finish(120)

    assert sizes_of(ended.stdout) == [2, 1, 2], ended.output
    # The run goes back to step 10, so that at most the samples of the steps after it, and of those read ahead, come twice.
    steps = [(int(step), int(samples)) for step, samples in re.findall(r"step (\d+) of \d samples (\d+)", ended.stdout)]
    assert steps[-1] == (42, 330), ended.output
    assert dict(steps) == {step: min(8 * step, 330) for step in range(1, 43)}
    reads = Counter(int(line) for line in (tmp_path / "seen").read_text().split())
    repeated = len(steps) - 42
    assert set(reads) == set(range(330))
    # At each of the two changes, a batch was in training and at most three were read ahead.
    assert reads.total() - 330 <= 8 * (repeated + 2 * 4), (reads, steps)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("backend", "loss"),
    [("pytorch-ddp", "link"), ("fsdp", "killed"), pytest.param("horovod", "killed", marks=pytest.mark.full)],
)
def test_nodes_go_and_come(
    make_machines: Callable[..., Machines],
    start: Callable[..., Started],
    unchanged: Callable[[str, int], list[float]],
    tmp_path: Path,
    backend: str,
    loss: str,
) -> None:
    """Three nodes; one is lost, one is told to leave, two come without a number: no node waits, and no restart is counted."""
    needs_backend(backend)
    expected = unchanged(backend, 3)
    shared = ["--checkpoint-dir", str(tmp_path / "shared")] if backend == "fsdp" else []  # each node writes a part
    machines = make_machines(3, are_names_loopback=backend != "horovod")

    def begin(rank: int, *numbered: str) -> Started:
        (machines.homes[rank] / "train.py").write_text(SCRIPT)
        own = [*with_nodes("1:3"), "--backend", backend, "--max-restarts", "1", *shared, *numbered]
        env = {"WAIT_S": "0.15", "SEEN": os.devnull, "DISTRIBUTED_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET[::-1]}
        return start([*machines.on(rank), *own], env=env, fresh=True)  # a forked process has no command line of its own

    zero, one, two = begin(0), begin(1, "--node-rank", "1"), begin(2, "--node-rank", "2")
    zero.wait_for("step 11 of 3", 120)
    commands = describe([pid for node in (zero, one, two) for pid in node.alive()])
    assert commands.count("--rdzv-endpoint") >= 3 and SECRET not in commands and SECRET[::-1] not in commands, commands
    if loss == "link":
        machines.link(2, "down")
    else:
        two.kill()
    zero.wait_for("of 2", GO_ON_S)
    if loss == "link":
        two.kill()
        machines.link(2, "up")
    one.signal(signal.SIGTERM)
    zero.wait_for("of 1", GO_ON_S)
    assert one.finish(60).returncode == 143
    again = [begin(1), begin(2)]
    zero.wait_for(lambda: zero.output.count("of 3") > 12, 60)
    ended = [node.finish(120) for node in (zero, *again)]

    assert [each.returncode for each in ended] == [0, 0, 0], "\n".join(each.output for each in ended)
    sizes = sizes_of(ended[0].stdout)
    assert sizes[:3] == [3, 2, 1] and sizes[-1] == 3, ended[0].output
    how = "has been silent for 10 s" if loss == "link" else "has ended, or its connection broke"
    assert f"node 2 (node2, 10.99.0.3) {how}: going on without it" in ended[0].stderr
    assert off(weights_of(ended[0].stdout), expected) <= 1e-9, ended[0].output
    written = [path for home in (*machines.homes, tmp_path / "shared") for path in home.rglob("*") if path.is_file()]
    assert {"config.yaml", "events.jsonl", "rank-0.log", "manifest.json"} <= {path.name for path in written}
    for home in machines.homes[1:]:  # which of rank 1 and rank 2 a node has depends on who came first
        assert list(home.glob("runs/*/logs/rank-[12].log")) and list(home.glob("runs/*/events.jsonl"))
    shown = [node.output.encode() for node in (zero, one, two, *again)]
    assert not any(SECRET.encode() in each for each in (*(path.read_bytes() for path in written), *shown))


@pytest.mark.cluster
def test_sigterm_to_all_nodes_stops_the_run_and_no_node_is_called_lost(
    make_machines: Callable[..., Machines], start: Callable[..., Started]
) -> None:
    machines = make_machines(2)

    def begin(rank: int) -> Started:
        (machines.homes[rank] / "train.py").write_text(SCRIPT)
        where = ["--nnodes", "1:2", "--node-rank", str(rank), "--rdzv-endpoint", f"10.99.0.1:{PORT}"]
        env = {"WAIT_S": "0.1", "SEEN": os.devnull, "DISTRIBUTED_TOKEN": SECRET}
        return start([*machines.on(rank), *command("--nproc-per-node", "1", *where)], env=env)

    nodes = [begin(0), begin(1)]
    nodes[0].wait_for("step 11 of 2", 120)
    for node in reversed(nodes):
        node.signal(signal.SIGTERM)
    ended = [node.finish(60) for node in nodes]

    assert [each.returncode for each in ended] == [143, 143], "\n".join(each.output for each in ended)
    for each in ended:
        assert "going on" not in each.output and "lost" not in each.output, each.output
    assert "to continue it:" in ended[0].output
    (result,) = machines.homes[0].glob("runs/*/result.json")
    assert json.loads(result.read_text())["status"] == "interrupted"


@pytest.mark.cluster
def test_fewer_nodes_than_the_fewest_are_waited_for(
    make_machines: Callable[..., Machines], start: Callable[..., Started]
) -> None:
    machines = make_machines(3)

    def begin(rank: int) -> Started:
        (machines.homes[rank] / "train.py").write_text(SCRIPT)
        where = ["--nnodes", "2:3", "--node-rank", str(rank), "--rdzv-endpoint", f"10.99.0.1:{PORT}"]
        env = {"WAIT_S": "0.1", "SEEN": os.devnull, "DISTRIBUTED_TOKEN": SECRET}
        return start(
            [*machines.on(rank), *command("--nproc-per-node", "1", "--set", "node_timeout=15", *where)], env=env
        )

    zero, one = begin(0), begin(1)
    zero.wait_for("step 11 of 2", 120)
    one.kill()
    ended = zero.finish(100)

    assert ended.returncode == 1
    assert "did not come back within 15 s (node_timeout)" in ended.stderr, ended.output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc-per-node", "4:1"], "nproc_per_node='4:1' is not MIN:MAX with 1 <= MIN <= MAX: write nproc_per_node='1:4'"),
        (["--nproc-per-node", "1:2", "--backend", "single"], "the number of processes cannot change with backend='single'"),
        (["--nnodes", "1:2", "--master-addr", "localhost"], "num_nodes=1:2 lets nodes join during the run, which needs a secret"),
        (["--nnodes", "1:2", "--nproc-per-node", "1:2"], "num_nodes and nproc_per_node are both MIN:MAX"),
        (["--set", "min_nproc_per_node=2"], "min_nproc_per_node=2, but nproc_per_node is not set: set nproc_per_node='2:MAX'"),
    ],
)  # fmt: skip
def test_a_wrong_range_is_refused(
    run_cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)

    done = run_cli(command(*flags)[3:], cwd=tmp_path)

    assert done.returncode == 2 and message in done.stderr, done.output
