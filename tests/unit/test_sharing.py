"""Whether a worker's script shared the work: its traces in the engines' modules, and what the launcher says of a script that did not."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import distributed
from distributed.launching.request import LaunchRequest
from distributed.launching.verdicts import Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from tests.warm import PARENT

ROOT = Path(__file__).resolve().parents[2]
# Each entry: what a script does, and whether it joined others by that. One process runs the torch ones, in a row.
TORCH = """
import sys
from distributed.launching.engines import has_joined
assert not has_joined(), "before torch"
import torch.distributed as dist
assert not has_joined(), "torch is preloaded in every worker"
{join}
assert has_joined(), "joined"
dist.destroy_process_group()
assert has_joined(), "and left again"
assert "ray" not in sys.modules and "tensorflow" not in sys.modules
"""
_C10D = "torch.distributed.distributed_c10d"  # joined or not, by other tests of this process
STORE = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
FILE = (
    "import tempfile; dist.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)"
)


@pytest.mark.parametrize("join", [STORE, FILE], ids=["store", "init-method"])
def test_a_group_of_torch_is_seen_also_after_it_was_left(join):
    done = subprocess.run([sys.executable, "-c", TORCH.format(join=join)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["horovod.common.basics", "ray", "mpi4py.MPI"])
def test_engines_that_only_a_script_imports_count_by_their_presence(monkeypatch, module):
    from distributed.launching.engines import has_joined

    for name in ("horovod.common.basics", "ray", "mpi4py.MPI", _C10D, "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not has_joined()
    monkeypatch.setitem(sys.modules, module, object())
    assert has_joined()


class _Job:
    def __init__(self, tasks):
        self.tasks = dict.fromkeys(range(tasks), "host:1")


class _Context:
    def __init__(self, tasks):
        cluster = type("Cluster", (), {"job": [_Job(tasks)]})
        self._server_def, self._collective_ops_server_def = None, type("Server", (), {"cluster": cluster})


@pytest.mark.parametrize(("tasks", "own", "joined"), [(2, None, True), (1, None, False), (2, 0, False), (2, 1, True)])
def test_a_strategy_counts_where_its_cluster_has_others_and_the_script_made_it(monkeypatch, tasks, own, joined):
    from distributed.launching.engines import has_joined

    for name in ("horovod.common.basics", "ray", "mpi4py.MPI", _C10D):
        monkeypatch.delitem(sys.modules, name, raising=False)
    context = type(sys)("context")
    context._context = _Context(tasks)
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", context)
    from distributed.backends._tensorflow import start

    if own is not None:  # the worker joined the cluster before the script began, as under --backend tensorflow
        monkeypatch.setattr(start._ClusterState, "joined", start.Joined(None, None))
        monkeypatch.setattr(start._ClusterState, "num_strategies", own)
    assert has_joined() is joined


def verdicts(tmp_path, **more):
    stream = io.StringIO()
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    request = LaunchRequest(str(run.path), script="mnist.py", nproc_per_node=2, **more)
    found = Verdicts(request, run, Display(stream, live=False))
    found.begin({0: 0, 1: 1}, 0)
    return found


def end(found, statuses=(0, 0), alone=(True, True)):
    for rank, (status, is_alone) in enumerate(zip(statuses, alone, strict=True)):
        if is_alone:
            found.add({"op": "event", "kind": "unshared", "rank": rank})
        found.add({"op": "exit", "local_rank": rank, "status": status, "time": time.time()})
    found.judge(0)
    found.show_end(found.exit_code())


def result(tmp_path):
    path = tmp_path / "run" / "result.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_work_that_nobody_shared_is_said_once_with_three_ways_out(tmp_path, capsys):
    end(verdicts(tmp_path))
    said = capsys.readouterr().err
    assert said.startswith(
        "warning: mnist.py ran on 2 processes, and none of them used a Trainer, joined a process group"
    )
    for way in ("distributed.Trainer", "init_process_group", "--nproc-per-node 1"):
        assert way in said
    assert said.count("warning") == 1
    found = result(tmp_path)
    assert found["status"] == "finished" and found["world_size"] == 2
    assert found["warnings"] == [said.removeprefix("warning: ").strip()]


@pytest.mark.parametrize(
    ("statuses", "alone", "more"),
    [
        ((0, 0), (True, False), {}),  # one of them joined something
        ((1, 0), (False, True), {}),  # the script failed
        ((0, 0), (True, True), {"payload": "job"}),  # a job by value is always a Trainer's
        ((0, 0), (True, True), {"node_rank": 1, "num_nodes": 2}),  # node 0 says it
    ],
)
def test_nothing_is_said_of_shared_work_and_of_a_script_that_failed(tmp_path, capsys, statuses, alone, more):
    end(verdicts(tmp_path, **more), statuses, alone)
    assert "ran on" not in capsys.readouterr().err
    assert result(tmp_path) is None


def test_an_attempt_is_judged_by_its_own_workers(tmp_path, capsys):
    found = verdicts(tmp_path)
    found.add({"op": "event", "kind": "unshared", "rank": 0})
    found.begin({0: 0, 1: 1}, 1)
    end(found, alone=(False, True))
    assert "ran on" not in capsys.readouterr().err


SCRIPT = """
import os, sys
print("trained", flush=True)
if sys.argv[1:] == ["fail"] and os.environ["RANK"] == "1":
    sys.exit(3)
if sys.argv[1:] == ["leave"]:
    if os.fork() == 0:  # whose end is not the worker's
        os._exit(0)
    os.wait()
    os._exit(0)
"""
LAUNCH = str(Path(distributed.__file__).parent / "launching" / "main.py")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["go", "leave", "fail"])
def test_workers_tell_their_launcher_that_they_shared_nothing(run_python, tmp_path, mode):
    script = tmp_path / "mnist.py"
    script.write_text(textwrap.dedent(SCRIPT))
    request = LaunchRequest(
        str(tmp_path / "run"), script=str(script), script_args=(mode,), nproc_per_node=2, preload=()
    )
    (tmp_path / "request.json").write_text(request.to_json())

    done = run_python([LAUNCH, str(tmp_path / "request.json"), PARENT], cwd=tmp_path)

    if mode != "fail":
        assert done.returncode == 0, done.output
        assert done.stderr.count("ran on 2 processes, and none of them used a Trainer") == 1, done.output
        assert result(tmp_path)["warnings"]
    else:
        assert done.returncode == 1 and "ran on" not in done.stderr, done.output
        assert "warnings" not in (result(tmp_path) or {})
