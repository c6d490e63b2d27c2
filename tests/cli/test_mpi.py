"""`mpirun` of Open MPI starts the workers, on one machine and on two that it reaches with `ssh` (see tests/machines.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_many_nodes import SCRIPT
from tests.conftest import Started, needs_backend
from tests.machines import Machines

pytestmark = pytest.mark.timeout(600)
SHORT = SCRIPT.replace("320", "64").replace("epochs=4", "epochs=1")
PAGE = Path(__file__).resolve().parents[2] / "docs/many-nodes.md"
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# mpirun binds each of several processes to a core, and counts those of the machine.
MPIRUN = ["mpirun", "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]


def train(backend: str) -> list[str]:
    flags = ["--set", "deepspeed.zero_stage=1"] if backend == "deepspeed" else []
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", "train.py"]
    return [*command, "--backend", backend, "--device", "cpu", *flags]


def environment(backend: str, **more: str) -> dict[str, str]:
    dtype = "float32" if backend == "deepspeed" else "float64"  # DeepSpeed has no float64
    return {**ROOT, "DTYPE": dtype, "OMP_NUM_THREADS": "1", **more}


def weights(start: Callable[..., Started], command: list[Any], cwd: Path, env: dict[str, str]) -> str:
    """Run a command that trains, and return the weights that rank 0 printed."""
    done = start(command, cwd=cwd, env=env).finish(300)
    assert done.returncode == 0, done.output
    return done.stdout.split("weights ")[1].split()[0]


def needs_mpi() -> None:
    if shutil.which("mpirun") is None:
        (pytest.fail if os.environ.get("REQUIRE_MPI") else pytest.skip)("there is no mpirun: install openmpi-bin")


def test_mpirun_trains_as_our_launcher_does(start: Callable[..., Started], tmp_path: Path) -> None:
    needs_mpi()
    (tmp_path / "train.py").write_text(SHORT)
    command, env = train("pytorch-ddp"), environment("pytorch-ddp")

    ours = weights(start, [*command, "--nproc-per-node", "2"], tmp_path, env)

    assert weights(start, [*MPIRUN, "-np", "2", *command, "--run-dir", "mpi"], tmp_path, env) == ours
    assert sorted(path.name for path in (tmp_path / "mpi" / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "backend",
    ["horovod", *(pytest.param(each, marks=pytest.mark.full) for each in ("pytorch-ddp", "fsdp", "deepspeed"))],
)
def test_mpirun_trains_on_two_machines_as_on_one(
    make_machines: Callable[..., Machines], start: Callable[..., Started], backend: str
) -> None:
    needs_mpi()
    needs_backend(backend)
    machines = make_machines(2)
    home = machines.homes[0]  # mpirun enters the same directory on each machine
    (home / "train.py").write_text(SHORT)
    command = train(backend)
    env = environment(backend, PATH=f"{machines.ssh()}:{os.environ['PATH']}")

    command_of_the_page = r"^mpirun (--host \S+) python -m distributed\.cli train --script examples/train\.py$"
    (hosts,) = re.findall(command_of_the_page, PAGE.read_text(), re.M)

    # Under mpirun Horovod sums with MPI, in another order than with Gloo. Our launcher takes less time, because it forks.
    by = [*MPIRUN, "-np", "4", *command] if backend == "horovod" else [*command, "--nproc-per-node", "4"]
    one = weights(start, [*by, "--run-dir", "one"], home, env)
    two = weights(start, [*machines.on(0), *MPIRUN, *hosts.split(), *command, "--run-dir", "two"], home, env)

    assert two == one
    results = [json.loads((home / name / "result.json").read_text()) for name in ("one", "two")]
    assert [(each["num_nodes"], each["world_size"]) for each in results] == [(1, 4), (2, 4)]
