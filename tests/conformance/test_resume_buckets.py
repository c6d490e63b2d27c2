"""DDP reorders its buckets after the first update.

With three ranks a resumed run must sum in the order of the whole run. The memory of a hook must not depend on this order.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest

JOB = Path(__file__).parent / "jobs" / "buckets.py"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="all", marks=pytest.mark.full),
        pytest.param({"comm_hook": "topk", "topk_ratio": 0.05}, id="topk"),
    ],
)
def test_three_processes_and_several_buckets_resume_bit_for_bit(run_cli, tmp_path, options):
    weights = []
    for step in (0, 10):  # never killed, and killed one step after a checkpoint
        out = tmp_path / f"{step}.npz"
        command = ["train", "--script", str(JOB), "--nproc-per-node", "3", "--run-dir", str(tmp_path / f"run-{step}")]
        done = run_cli([*command, "--", str(out), str(step), json.dumps(options)])
        assert done.returncode == 0, done.output
        assert ("restarting" in done.stderr) == (step > 0)
        weights.append(dict(numpy.load(out)))
    whole, resumed = weights
    assert all((whole[name] == resumed[name]).all() for name in whole)
