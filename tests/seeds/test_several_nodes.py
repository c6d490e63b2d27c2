"""The samples for several nodes, on two machines that share no directory (see tests/machines.py)."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import ray_clusters
from tests.conftest import Finished, Started, needs_backend
from tests.machines import Machines
from tests.seeds.test_seeds import GPT, HERE, SAMPLES, environment
from tests.slurm import Slurm, needs_slurm

pytestmark = pytest.mark.timeout(600)

WITH_A_TRAINER = """
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer

inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
trainer = Trainer(torch.nn.Linear(4, 2), epochs=2, batch_size=8)
history = trainer.fit(TensorDataset(inputs, (inputs.sum(1) > 0).long()))
print(f"{history.steps} steps of {trainer.plan.world_size} processes")
"""


class Nodes:
    """Two machines, on which samples run."""

    def __init__(self, machines: Machines, start: Callable[..., Started]) -> None:
        self.machines, self._start = machines, start
        self._env = {**environment(), "NODE0": machines.addresses[0]}  # one port for all

    def put(self, **files: Path) -> None:
        """Copy scripts into the directory of each machine."""
        for home in self.machines.homes:
            for name, file in {**files, "names": HERE / "names.py"}.items():
                shutil.copy(file, home / f"{name}.py")

    def begin(self, number: int, *command: str | Path, **env: str) -> Started:
        """Start a command on a machine."""
        return self._start([*self.machines.on(number), *command], env={**self._env, **env})

    def run(self, *samples: str, **env: str) -> list[Finished]:
        """Run one shell sample on each machine, and check that both succeed."""
        begun = [self.begin(number, "bash", SAMPLES / sample, **env) for number, sample in enumerate(samples)]
        done = [each.finish(150) for each in begun]
        assert [each.returncode for each in done] == [0] * len(done), "\n".join(each.output for each in done)
        return done


@pytest.fixture
def nodes(make_machines: Callable[..., Machines], start: Callable[..., Started]) -> Nodes:
    return Nodes(make_machines(2), start)


def rank_logs(homes: list[Path]) -> dict[str, str]:
    """Return the log of each rank, from the machine on which it ran."""
    return {path.stem: path.read_text() for home in homes for path in home.glob("runs/*/logs/rank-*.log")}


@pytest.mark.parametrize("document", ["000", pytest.param("001", marks=pytest.mark.cluster)])
def test_the_launcher_trains_the_template_on_two_nodes(nodes: Nodes, document: str) -> None:
    """000/node_0.sh, 000/node_1.sh, 001/node_0.sh, 001/node_1.sh"""
    nodes.put(train=SAMPLES / document / "train.py")

    done = nodes.run(f"{document}/node_0.sh", f"{document}/node_1.sh")

    assert "Process 0/4" in done[0].stdout
    logs = rank_logs(nodes.machines.homes)
    assert sorted(logs) == [f"rank-{rank}" for rank in range(4)]
    told = {re.search(r"loss ([\d.]+) weights (\S+)", log).groups() for log in logs.values()}
    assert len(told) == 1 and float(told.pop()[0]) < 0.5  # above 1 before; the ranks saw other samples


@pytest.mark.cluster
def test_a_launcher_in_python_takes_its_node_from_the_environment(nodes: Nodes) -> None:
    """000/launcher.py"""
    nodes.put(launch=SAMPLES / "000/launcher.py")
    for home in nodes.machines.homes:
        (home / "train.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['WORLD_SIZE'], flush=True)\n")
    pod = {"WORLD_SIZE": "4", "MASTER_ADDR": nodes.machines.addresses[0]}

    begun = [nodes.begin(rank, sys.executable, "launch.py", JOB_COMPLETION_INDEX=str(rank), **pod) for rank in (0, 1)]
    done = [each.finish(100) for each in begun]

    assert [each.returncode for each in done] == [0, 0], done[0].output + done[1].output
    logs = rank_logs(nodes.machines.homes)
    assert len(logs) == 4 and all("['--epochs', '100'] 4" in log for log in logs.values())


@pytest.mark.cluster
@pytest.mark.parametrize("sample", ["rank", "production"])
def test_the_gpt_of_003_trains_on_two_nodes(nodes: Nodes, sample: str) -> None:
    """003/rank_0.sh, 003/rank_1.sh: a process each. 003/production_0.sh, 003/production_1.sh: two processes each."""
    nodes.put(char_gpt=GPT["char_gpt.py"])

    nodes.run(f"003/{sample}_0.sh", f"003/{sample}_1.sh")

    (run,) = (nodes.machines.homes[0] / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    processes = 2 if sample == "rank" else 4
    assert (result["status"], result["world_size"], result["steps"]) == ("finished", processes, 4)


@pytest.mark.cluster
def test_horovodrun_starts_processes_on_two_nodes(
    make_machines: Callable[..., Machines], start: Callable[..., Started], tmp_path: Path
) -> None:
    """002/horovod_nodes.sh"""
    needs_backend("horovod")
    nodes = Nodes(make_machines(2, are_names_loopback=False), start)
    nodes.put(train=HERE / "horovod_driver.py")
    path = f"{nodes.machines.ssh()}:{environment()['PATH']}"

    nodes.run("002/horovod_nodes.sh", SAMPLES_OUT=str(tmp_path), PATH=path)

    failed = [json.loads((tmp_path / f"failed-{rank}.json").read_text()) for rank in (0, 1)]
    assert failed == [{}, {}]


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.xdist_group("a cluster of Ray")
def test_a_ray_cluster_of_two_nodes_trains(nodes: Nodes) -> None:
    """002/ray_nodes.sh"""
    needs_backend("ray")
    addresses, quiet = nodes.machines.addresses, ray_clusters.OPEN
    ray = [ray_clusters.RAY, "start", "--block", "--num-cpus=1", "--object-store-memory=100000000"]
    places = (
        ["--head", "--port=6399", "--ray-client-server-port=10001", "--include-dashboard=false"],
        [f"--address={addresses[0]}:6399"],
    )
    (nodes.machines.homes[0] / "train.py").write_text(WITH_A_TRAINER)
    with contextlib.ExitStack() as stack:
        for number, place in enumerate(places):
            files = stack.enter_context(tempfile.TemporaryDirectory(prefix="r-"))  # short: sockets lie in it
            words = [*ray, *place, f"--node-ip-address={addresses[number]}"]
            begin = functools.partial(nodes.begin, number, *words, RAY_TMPDIR=files, **quiet)
            stack.callback(ray_clusters.start(begin).kill)

        (done,) = nodes.run("002/ray_nodes.sh", **quiet)

    assert "8 steps of 2 processes" in done.stdout, done.output


# ------------------------------------------------------------------ SLURM


@pytest.fixture
def slurm(make_machines: Callable[..., Machines], tmp_path: Path) -> Iterator[Slurm]:
    needs_slurm()
    tmp_path.chmod(0o755)
    slurm = Slurm(make_machines(2, are_names_loopback=False), tmp_path / "slurm")
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()


def submit(slurm: Slurm, sample: str, script: Path) -> tuple[Path, str]:
    """Submit a sample beside its script, and return (the directory, what the job printed)."""
    home = slurm.machines.homes[0] / sample.replace("/", "-")
    home.mkdir()
    for file in (script, HERE / "names.py"):
        shutil.copy(
            file,
            home / ("train.py" if file.parent.name in ("001", "seeds") and file != HERE / "names.py" else file.name),
        )
    job = slurm.run("sbatch", f"--chdir={home}", f"--output={home}/out.txt", str(SAMPLES / sample)).split()[-1]
    state = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", seconds=120)
    text = (home / "out.txt").read_text()
    assert state == "COMPLETED", text
    return home, text


@pytest.mark.cluster
def test_the_batch_files_of_the_documents_train_on_two_nodes(slurm: Slurm) -> None:
    """000/slurm.sh: a task for each process. 002/slurm.sh: torch's own launcher on each node. 003/slurm.sh: the GPT."""
    _, text = submit(slurm, "000/slurm.sh", SAMPLES / "001/train.py")  # that of 000 asks for nccl, which needs GPUs
    assert set(re.findall(r"Process (\d)/4", text)) == set("0123")
    assert len(set(re.findall(r"loss [\d.]+ weights \S+", text))) == 1

    _, text = submit(slurm, "002/slurm.sh", HERE / "with_a_trainer.py")
    assert "steps of 4 processes" in text

    home, _ = submit(slurm, "003/slurm.sh", GPT["char_gpt.py"])
    (result,) = home.glob("runs/*/result.json")
    assert json.loads(result.read_text())["world_size"] == 4
