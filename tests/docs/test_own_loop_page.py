"""The first diff of docs/own-loop.md is short, and both of its sides train."""

from __future__ import annotations

import re

import pytest
import torch

from tests.docs.test_pages import ROOT, blocks

((_, _, DIFF),) = [block for block in blocks(ROOT / "docs" / "own-loop.md") if block[0] == "diff"]
# The names that the diff leaves to the reader's script. An epoch is one update, because torch's sampler and the Session shuffle in
# different orders. On CPUs, DDP refuses `device_ids`, and no device is current.
BEGIN = """
import os
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())

def Net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
"""
BEFORE = """
import torch.distributed as dist
from torch.utils.data import DistributedSampler

device, local_rank = "cpu", int(os.environ["LOCAL_RANK"])
torch.cuda.set_device = lambda device: None

def DistributedDataParallel(model, device_ids):
    assert device_ids == [local_rank]
    return torch.nn.parallel.DistributedDataParallel(model)
"""
AFTER = """
import distributed
"""
END = """
model = getattr(model, "module", model)
with torch.no_grad():
    loss, first = (cross_entropy(each(data.tensors[0]), data.tensors[1]) for each in (model, Net()))
    outcome = {"gain": first - loss, **model.state_dict()}
torch.save(outcome, f"{os.environ['RANK']}.pt")
"""
LEAVE = """
dist.destroy_process_group()
"""


def side(sign):
    return "".join(f"{line[1:]}\n" for line in DIFF.splitlines() if line.startswith(sign))


def test_the_change_is_ten_lines_or_fewer():
    assert {line[0] for line in DIFF.splitlines()} == {"-", "+"}
    assert len(re.findall(r"^\+", DIFF, re.M)) <= 10
    compile(side("-") + side("+"), "diff", "exec")


@pytest.mark.docs
def test_the_loop_trains_the_same_before_and_after_the_change(run_cli, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for directory, text in (
        (before, BEGIN + BEFORE + side("-") + END + LEAVE),
        (after, BEGIN + AFTER + side("+") + END),
    ):
        directory.mkdir()
        (directory / "train.py").write_text(text)
        done = run_cli(["train", "--device", "cpu", "--nproc-per-node", "2", "--script", "train.py"], cwd=directory)
        assert done.returncode == 0, done.output

    expected, other, *found = (torch.load(place / f"{rank}.pt") for place in (before, after) for rank in range(2))
    for outcome in (other, *found):
        torch.testing.assert_close(outcome, expected)
    assert expected["gain"] > 1e-3
