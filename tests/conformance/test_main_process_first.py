"""`main_process_first` lets the first process of each node, or of all nodes, run a block before the others do."""

from __future__ import annotations

import json
import socket
import sys

import pytest

from tests.conformance.runs import FULL
from tests.conftest import needs_backend

pytestmark = pytest.mark.timeout(200)
# Each block notes the ranks that have left it before, and those that are to be first leave it together.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from distributed import Trainer

rank, out = int(os.environ["RANK"]), Path(sys.argv[1])
if "keras" in sys.argv:
    import keras

    def make():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
else:
    import torch

    def make():
        return torch.nn.Linear(2, 1)


trainer = Trainer(make, loss_fn="mse", device="cpu", verbose=False)


def all_begun(name, ranks):
    return all((out / f"{name}-{each}-begun").exists() for each in ranks)


seen = {}
for name, first in json.loads(sys.argv[2]).items():
    with trainer.main_process_first(local=name == "local"):
        seen[name] = [each for each in (0, 1) if (out / f"{name}-{each}-left").exists()]
        (out / f"{name}-{rank}-begun").touch()
        deadline = time.monotonic() + 60
        while rank in first and not all_begun(name, first):
            assert time.monotonic() < deadline, f"rank {rank} is alone in the block"
            time.sleep(0.01)
        (out / f"{name}-{rank}-left").touch()
(out / f"{rank}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path / "script.py")


def seen(out):
    """Return what each rank saw: name of a block -> the ranks that had left it before."""
    return [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    "backend",
    [
        "pytorch-ddp",
        *(pytest.param(name, marks=FULL) for name in ("fsdp", "deepspeed", "horovod", "ray", "tensorflow")),
    ],
)
def test_on_one_node_its_first_process_is_the_main_process(backend, script, run_cli, tmp_path):
    needs_backend(backend)
    first = json.dumps({"local": [0], "global": [0]})
    command = ["train", "--script", script, "--backend", backend, "--nproc-per-node", "2"]
    kind = ["keras"] if backend == "tensorflow" else []
    done = run_cli([*command, "--", str(tmp_path), first, *kind], cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert seen(tmp_path) == [{"local": [], "global": []}, {"local": [0], "global": [0]}]


def test_on_two_nodes_the_first_process_of_each_is_local(script, start, tmp_path):
    """Two processes with the variables that torchrun sets on two nodes of one process each."""
    first = json.dumps({"local": [0, 1], "global": [0]})
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **store}
    argv = [sys.executable, script, str(tmp_path), first]
    ranks = [start(argv, cwd=tmp_path, env={**place, "RANK": rank, "GROUP_RANK": rank}) for rank in ("0", "1")]
    for each in ranks:
        done = each.finish(100)
        assert done.returncode == 0, done.output
    assert seen(tmp_path) == [{"local": [], "global": []}, {"local": [], "global": [0]}]
