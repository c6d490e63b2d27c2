"""Scripts without a Trainer: every call in one process, under our launcher and under torchrun, and each launcher of scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "jobs" / "communication" / "script.py"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# A script as guides show it: written for GPUs, and run on CPUs with one flag.
TEMPLATE = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from distributed import (DistributedDataParallel, DistributedSampler, all_reduce, ReduceOp, destroy_process_group,
                         get_rank, get_world_size, init_process_group)

def main():
    init_process_group(backend="nccl")
    local_rank, world_size, rank = int(os.environ["LOCAL_RANK"]), get_world_size(), get_rank()
    print(f"Process {rank}/{world_size} on {local_rank} {sys.argv[1:]}")
    torch.manual_seed(0)
    inputs = torch.randn(64, 4, dtype=torch.float64)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = DistributedDataParallel(torch.nn.Linear(4, 1).double())
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            model.sync_gradients()
            optimizer.step()
            optimizer.zero_grad()
    loss = all_reduce(loss.detach(), ReduceOp.AVERAGE).item()
    weight = model.module.weight.sum().item()
    destroy_process_group()
    print(f"loss {loss:.6f} weight {weight:.9f}")

if __name__ == "__main__":
    main()
"""
LAUNCH = """
import sys
from distributed import DistributedLauncher, LaunchConfig, launch_distributed_training
code = launch_distributed_training("train.py", "--model", "transformer", nproc_per_node=2, nnodes=1, backend="gloo")
assert code == 0, code
launcher = DistributedLauncher(LaunchConfig(nproc_per_node=2, backend="gloo", max_restarts=0, monitor_interval=1.0))
open("fails.py", "w").write("raise RuntimeError('on purpose')")
sys.exit(10 + launcher.launch("fails.py"))
"""


def facts(done):
    assert done.returncode == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_call_works_in_a_single_process(run_python):
    found = facts(run_python([str(SCRIPT)], env=ONE_THREAD))
    assert [(each["world_size"], each["backend"]) for each in found] == [(1, "gloo")]


def test_every_call_works_under_our_launcher(run_python, tmp_path):
    found = facts(
        run_python(
            ["-m", "distributed.launcher", str(SCRIPT), "--nproc_per_node=2", "--backend=gloo", "--epochs", "3"],
            cwd=tmp_path,
        )
    )
    assert [(each["world_size"], each["argv"]) for each in found] == [(2, ["--epochs", "3"])]


@pytest.mark.full  # test_launch.py compares the environment of our workers with that of torchrun's
def test_every_call_works_on_three_ranks_of_torchrun(run_python, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    found = facts(run_python([*torchrun, str(SCRIPT)], cwd=tmp_path, env=ONE_THREAD))
    assert sorted(each["rank"] for each in found) == [0, 1, 2]


def test_a_script_for_gpus_trains_on_cpus_and_from_python(run_python, tmp_path):
    (tmp_path / "train.py").write_text(TEMPLATE)
    (tmp_path / "launch.py").write_text(LAUNCH)

    by_flag = run_python(
        ["-m", "distributed.launcher", "train.py", "--nproc_per_node=2", "--backend=gloo"], cwd=tmp_path
    )
    assert by_flag.returncode == 0, by_flag.output
    assert "Process 0/2 on 0 []" in by_flag.stdout and "is replaced by the launcher's 'gloo'" in by_flag.stderr
    from_python = run_python([str(tmp_path / "launch.py")], cwd=tmp_path)
    assert from_python.returncode == 11, from_python.output
    assert "Process 0/2 on 0 ['--model', 'transformer']" in from_python.stdout
    assert "on purpose" in from_python.stderr and from_python.output.count("on purpose") <= 2
    results = {line for done in (by_flag, from_python) for line in done.stdout.splitlines() if line.startswith("loss")}
    assert len(results) == 1 and float(results.pop().split()[1]) < 0.01


def test_nothing_of_it_loads_a_framework(run_python):
    code = (
        "import sys, distributed.comm, distributed.launcher.scripts as s; assert 'torch' not in sys.modules; print(s)"
    )
    assert run_python(["-c", code]).returncode == 0


def test_an_absent_rank_is_named_with_the_call(run_python, tmp_path):
    script = tmp_path / "absent.py"
    script.write_text("import os, distributed\nif os.environ['RANK'] == '0':\n    distributed.init_process_group()\n")
    done = run_python(
        ["-m", "distributed.launcher", str(script), "--nproc_per_node=2", "--start_timeout=2", "--device=cpu"],
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.output
    assert "rank 1 did not join within start_timeout=2 s: every rank must call init_process_group()" in done.stderr
